"""What pydantic found wrong with a "dsx" block, in dsx's words: key, value, allowed, fix."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dsx.config.files import shown
from dsx.config.words import allowed, example, instead, schema_at
from dsx.core.checks import nearest

_FIRST = ("extra_forbidden", "union_tag_invalid", "union_tag_not_found")
_ADVICE = re.compile(
    r"[;:,] (?:or )?(?:try|use|give|leave|set|add|write|keep|raise|did you mean|profile|let)\b"
    "|Allowed:"
)


def explain_choice(
    error: ValidationError,
    axis: str,
    values: Mapping[str, Any],
    selector: str,
    choices: Sequence[str],
    model: type[BaseModel] | None,
    usual: Mapping[str, Any],
) -> str:
    """Return the message for an axis.

    `choices` are their names, `model` that of the one that is named, if it is known, and `usual`
    holds what its keys are if they are left out.
    """
    path, name = f"dsx.{axis}", values[selector]
    found = _first(error)
    if model is None or found["type"].startswith("union_tag"):
        return f"{path}.{selector}={shown(name)} is not known{nearest(word_of(name), choices)}"
    where = found["loc"][1:]  # after the name of the choice
    if found["type"] == "extra_forbidden":
        context = f" for {selector}={name!r}"
        near = nearest(str(where[0]), model.model_fields)
        return f"{path}.{shorten_key(where[0])} is not a known key{context}{near}"
    schema = model.model_json_schema()
    missing = [str(e["loc"][-1]) for e in error.errors() if e["type"] == "missing"]
    if missing and missing[0] in model.model_fields:
        keys = {key: json.loads(example(schema_at(schema, [key]))) for key in missing}
        needs = f"{path} with {selector}={name!r} needs {', '.join(missing)}"
        return f'{needs}; add "{axis}": {json.dumps({selector: name, **keys})}'
    return _value(path, where[:1], values.get(where[0]), schema, usual)


def explain_section(
    error: ValidationError, path: str, model: type[BaseModel], values: Mapping[str, Any]
) -> str:
    """Return the message for a pydantic model, whose keys stand below `path`."""
    found = _first(error)
    *parents, key = found["loc"]
    schema = model.model_json_schema()
    if found["type"] == "extra_forbidden":
        for parent in parents:
            model = model if isinstance(parent, int) else _model_of(model, str(parent))
        where = f"{_place(path, parents)}.{shorten_key(key)}"
        return f"{where} is not a known key{nearest(str(key), model.model_fields)}"
    if found["type"] == "missing" and not any(isinstance(part, int) for part in found["loc"]):
        where = ".".join([path, *map(str, found["loc"])])
        return f"{where} is missing{_advice_of_missing(schema, found['loc'])}"
    of_key = [*found["loc"]]
    is_object = found["type"] in ("model_type", "dict_type")
    while isinstance(of_key[-1], int) and not is_object:  # a list of plain values is shown whole
        of_key.pop()
    value: Any = values
    for part in of_key:
        value = value[part]
    if is_object:
        is_secret = _holds_secrets(schema_at(schema, of_key), schema)
        told = f"a {type(value).__name__}" if is_secret else shown(value)
        advice = _advice_of_missing(schema, of_key) or "; leave it out, or write its keys in {}"
        return f"{_place(path, of_key)} must be an object, not {told}{advice}"
    return _value(path, of_key, value, schema, {})


def with_advice(message: str, axes: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return what a method's own check says, with what to do where it has not said that.

    `axes` are what holds if the keys of `given` are left out, by axis.
    """
    said = re.match(r"(\w+)\.(\w+)(?:\[\d+\])?=", message)
    if _ADVICE.search(message) or said is None:
        return message
    axis, key = said.groups()
    if key not in given.get(axis, {}):
        return message
    usual = axes.get(axis, {})
    return f"{message}; {_leave_out(usual[key])}" if key in usual else message


def word_of(value: Any) -> str:
    """Return what a name may have been meant to be; nothing of what is no text."""
    return str(value)[:80] if isinstance(value, str | list | dict) else ""


def shorten_key(key: Any) -> str:
    """Return a key as it is shown in a message."""
    text = str(key)
    return text if text.isidentifier() and len(text) <= 80 else shown(text)


def _first(error: ValidationError) -> Any:
    """Return the error to tell of: a name that is not known explains the others."""
    found = error.errors(include_url=False)
    return next((e for e in found if e["type"] in _FIRST), found[0])


def _model_of(model: type[BaseModel], key: str) -> type[BaseModel]:
    annotation: Any = model.model_fields[key].annotation
    return next((one for one in get_args(annotation) if hasattr(one, "model_fields")), annotation)


def _place(path: str, loc: Sequence[Any]) -> str:
    """Return where a value stands, as "dsx.metrics.notices[0].form"."""
    return path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)


def _value(
    path: str,
    loc: Sequence[Any],
    value: Any,
    model_schema: Mapping[str, Any],
    usual: Mapping[str, Any],
) -> str:
    """Return `key=value must be ...; fix`."""
    schema = schema_at(model_schema, loc)
    better = None if _holds_secrets(schema, model_schema) else instead(schema, value)
    if better is not None:
        advice = f"write {better}"
    elif loc[-1] in usual or "default" in schema:
        advice = _leave_out(usual.get(loc[-1], schema.get("default")))
    else:
        advice = f"try {example(schema)}"
    told = "" if _holds_secrets(schema, model_schema) else f"={shown(value)}"
    return f"{_place(path, loc)}{told} must be {allowed(schema)}; {advice}"


def _holds_secrets(schema: Mapping[str, Any], model_schema: Mapping[str, Any]) -> bool:
    """Whether what stands there may hold a value that is not to be shown."""
    definitions = json.dumps(model_schema.get("$defs", {}))
    text = json.dumps(schema)
    return '"writeOnly"' in text or ("$ref" in text and '"writeOnly"' in definitions)


def _leave_out(usual: Any) -> str:
    return f"leave it out for {json.dumps(usual)}"


def _advice_of_missing(schema: Mapping[str, Any], path: Sequence[Any]) -> str:
    kind = schema_at(schema, path)
    if kind.get("type") == "object":
        if not kind.get("required"):
            return ""
        needed = {key: json.loads(example(kind["properties"][key])) for key in kind["required"]}
        return f'; write "{path[-1]}": {json.dumps(needed)}'
    return f'; add "{path[-1]}": {example(kind)}' if kind.get("type") else ""
