"""Every key of the "dsx" block, as a page for readers and as a JSON Schema for editors.

Both are made from the models of the sections, the registered choices and the text below each
field, so that a key is described where it is declared.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel

from dsx.config.axes import choice_model
from dsx.config.schema import resolve_method
from dsx.config.sections import Block
from dsx.core.registry import FORMER
from dsx.method.choices import AXES, PRESETS

_SECTIONS = (
    "clusters", "state", "coding", "link", "checkpoints", "divergence", "guard", "metrics", "plan",
)  # fmt: skip
_Schema = dict[str, Any]

_INTRODUCTION = """\
# Configuration

<!-- Made by `dsx config reference`; a change here is lost. Change the text below the field. -->

Everything about a run stands in the "dsx" block of a DeepSpeed JSON. A preset fills every axis of
the method; any key overrides one value of it, and another `type` starts from that type's defaults:

```json
"dsx": {
  "preset": "streaming_diloco",
  "clusters": {"num_clusters": 2, "rendezvous": "tcp://10.0.0.1:29400"},
  "schedule": {"interval": 50},
  "outer_optimizer": {"type": "momentum", "lr": 0.7, "momentum": 0.5}
}
```

- A key that is not known, or that the chosen type would ignore, is an error that names the nearest
  one.
- Every key is a flag too, for scripts whose settings are flags: `--dsx-preset diloco`,
  `--dsx-schedule-interval 50`; those of `clusters` go without their section,
  `--dsx-num-clusters 2`. Flags override the block of the file that `--dsx-config` names. A value is
  written as in JSON; the elements of a list may also stand with commas between them.
- `docs/dsx.schema.json` says the same as a JSON Schema, for editors that complete and check a file
  while it is written.
- A checkpoint resumes with other values, not with another `type` on an axis.

What the methods do, and where they come from, is under [Methods](methods/index.md).
"""


def markdown() -> str:
    """Return the page: the block, its sections, and the choices on every axis."""
    parts = [_INTRODUCTION, *_presets()]
    own = meanings(Block)
    for section in _SECTIONS:
        model: Any = Block.model_fields[section].annotation
        keys = _properties(model, meanings(model))
        parts += [f"## {section}\n", f"{own[section]}\n", _table(keys)]
        for key, inner in _models_in(model).items():
            of_one = _properties(inner, meanings(inner))
            parts += [f"### {section}: {key}\n", f"{_first_line(inner)}\n", _table(of_one)]
    for axis in AXES:
        parts += [f"## {axis}\n", f"{own[axis]}\n", *_axis(axis)]
    return "\n".join(parts)


def json_schema() -> _Schema:
    """Return the JSON Schema of a DeepSpeed JSON, of which it says nothing but the "dsx" block."""
    own = meanings(Block)
    block = Block.model_json_schema()
    properties: _Schema = {"preset": {"enum": list(PRESETS), "description": own["preset"]}}
    for section in _SECTIONS:
        model: Any = Block.model_fields[section].annotation
        properties[section] = {**_schema_of(model), "description": own[section]}
    for axis, (_, choices) in AXES.items():
        variants = [_variant(axis, name, kind) for name, kind in choices.items()]
        properties[axis] = {"description": own[axis], "type": "object", "anyOf": variants}
    ordered = {key: properties[key] for key in Block.model_fields}
    dsx = {"description": "One run across clusters.", "type": "object", "properties": ordered}
    dsx |= {"required": block["required"], "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": 'DeepSpeed configuration with a "dsx" block',
        "type": "object",
        "properties": {"dsx": dsx},
        "required": ["dsx"],
    }


def meanings(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a class; nothing for a class without a source file."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        definition = _classes(base.__module__).get(base.__name__)
        for field, text in pairwise(definition.body if definition else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = text.value if isinstance(text, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[field.target.id] = " ".join(value.value.split())
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes in a module's source by name; nothing for what was typed at a prompt."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _presets() -> Iterator[str]:
    yield "## preset\n"
    yield f"{meanings(Block)['preset']} What each of them fills in, for two clusters:\n"
    rows = [["preset", "what it does", "values"]]
    for name, make in PRESETS.items():
        values = [_short(axis, choice) for axis, choice in resolve_method(name, {})[1].items()]
        rows.append([f"`{name}`", _first_line(make), "; ".join(v for v in values if v)])
    yield _markdown_table(rows)


def _short(axis: str, choice: Mapping[str, Any]) -> str:
    """Return a preset's choice in few words; nothing for one that does nothing."""
    selector = AXES[axis].selector
    name = choice[selector]
    if name in ("none", "fixed", "dense"):
        return ""
    kind = AXES[axis].choices[name]
    usual = {f.name: f.default for f in kind.__dataclass_fields__.values()}
    given = [f"{k} {json.dumps(v)}" for k, v in choice.items() if k != selector and v != usual[k]]
    return f"{axis} `{name}`" + (f" ({', '.join(given)})" if given else "")


def _axis(axis: str) -> Iterator[str]:
    selector, choices = AXES[axis]
    rows = [[f"`{selector}`", "what it does"]]
    rows += [[f"`{name}`", _first_line(kind)] for name, kind in choices.items()]
    yield _markdown_table(rows)
    for name, kind in choices.items():
        model = choice_model(axis, name, kind, has_limits=True)
        keys = _properties(model, meanings(kind))
        keys.pop(selector)
        if keys:
            yield f"### {axis}: {name}\n"
            yield _table(keys)


def _variant(axis: str, name: str, kind: type[Any]) -> _Schema:
    """Return one choice's schema; a key that is left out is the preset's."""
    model = choice_model(axis, name, kind, has_limits=True)
    schema = _described(model.model_json_schema(), meanings(kind))
    schema.pop("required", None)
    names: list[_Schema] = [{"const": name}]
    for former, today in FORMER.get(axis, {}).items():
        if today == name:
            names.append({"const": former, "deprecated": True})
    schema["properties"][AXES[axis].selector] = {"anyOf": names} if names[1:] else names[0]
    return {**schema, "title": f"{axis}: {name}", "description": _first_line(kind)}


def _schema_of(model: type[BaseModel]) -> _Schema:
    """Return a section's schema; objects that its lists hold are written out where they stand."""
    schema = _described(model.model_json_schema(), meanings(model))
    schema.pop("$defs", None)
    for key, inner in _models_in(model).items():
        schema["properties"][key]["items"] = _schema_of(inner)
    return schema


def _models_in(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the models whose objects the lists of a section hold, by key."""
    found: dict[str, type[BaseModel]] = {}
    for key, field in model.model_fields.items():
        for one in get_args(field.annotation):
            if isinstance(one, type) and issubclass(one, BaseModel):
                found[key] = one
    return found


def _described(schema: _Schema, texts: Mapping[str, str]) -> _Schema:
    """Return a schema whose properties say what they mean, without pydantic's titles."""
    for key, value in schema["properties"].items():
        value.pop("title", None)
        if key in texts:
            value["description"] = texts[key]
    schema.pop("title", None)
    return schema


def _properties(model: type[BaseModel], texts: Mapping[str, str]) -> _Schema:
    schema = _described(model.model_json_schema(), texts)
    for key in schema.get("required", ()):
        schema["properties"][key]["required"] = True
    return schema["properties"]


def _table(keys: Mapping[str, _Schema]) -> str:
    rows = [["key", "type", "default", "allowed", "meaning"]]
    for key, value in keys.items():
        default = "needed" if value.get("required") else f"`{json.dumps(value.get('default'))}`"
        allowed, meaning = _allowed(value), value.get("description", "")
        rows.append([f"`{key}`", _type(value), default, allowed, meaning])
    return _markdown_table(rows)


def _type(value: _Schema) -> str:
    """Return a type in the words of JSON."""
    if "anyOf" in value:
        return " or ".join(_type(one) for one in value["anyOf"])
    if value.get("type") == "array":
        items = value.get("items") or value["prefixItems"][0]
        items = {"type": "object"} if "$ref" in items else items
        count = f"{value['maxItems']} " if "maxItems" in value else ""
        return f"list of {count}{_type(items)}s"
    if "enum" in value or "const" in value:
        value = {"type": "integer" if isinstance(value.get("const"), int) else "string"}
    return str(value["type"])


def _allowed(value: _Schema) -> str:
    one, *more = [v for v in value.get("anyOf", ()) if v.get("type") != "null"] or [value]
    names = [_allowed_of_one(v) for v in more if "enum" in v or "const" in v]
    return ", or ".join([_allowed_of_one(one), *names])


def _allowed_of_one(one: _Schema) -> str:
    one = {} if "$ref" in one.get("items", {}) else one.get("items", one)
    if "enum" in one or "const" in one:
        return ", ".join(f"`{json.dumps(v)}`" for v in one.get("enum", [one.get("const")]))
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    limits["exclusiveMaximum"] = "below"
    return ", ".join(f"{words} {one[key]:g}" for key, words in limits.items() if key in one)


def _first_line(described: Any) -> str:
    """Return the first sentence of a docstring, as one line."""
    paragraph = (inspect.getdoc(described) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _markdown_table(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body, ""])
