"""What pydantic found wrong with a "dsx" block, in dsx's words: key, value, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dsx.core.checks import nearest

_FIRST = ("extra_forbidden", "union_tag_invalid", "union_tag_not_found")


def explain_choice(
    error: ValidationError, axis: str, values: Mapping[str, Any], selector: str, keys: Sequence[str]
) -> str:
    """Return the message for an axis: `keys` are those of the choice, or the choices' names."""
    path, name = f"dsx.{axis}", values[selector]
    found = _first(error)
    if found["type"].startswith("union_tag"):
        return f"{path}.{selector}={name!r} is not known{nearest(str(name), keys)}"
    where = found["loc"][1:]  # after the name of the choice
    if found["type"] == "extra_forbidden":
        context = f" for {selector}={name!r}"
        return f"{path}.{where[0]} is not a known key{context}{nearest(str(where[0]), keys)}"
    missing = [str(e["loc"][-1]) for e in error.errors() if e["type"] == "missing"]
    if missing:
        return f"{path} with {selector}={name!r} needs {', '.join(missing)}"
    return _value(path, where, found)


def explain_section(error: ValidationError, path: str, model: type[BaseModel]) -> str:
    """Return the message for a pydantic model, whose keys stand below `path`."""
    found = _first(error)
    *parents, key = found["loc"]
    where = ".".join([path, *(str(part) for part in found["loc"])])
    if found["type"] == "extra_forbidden":
        for parent in parents:
            model = _model_of(model, str(parent))
        return f"{where} is not a known key{nearest(str(key), model.model_fields)}"
    if found["type"] == "missing":
        return f"{where} is missing"
    if found["type"] in ("model_type", "dict_type"):
        return f"{where} must be an object, not {found['input']!r}"
    return _value(path, found["loc"], found)


def _first(error: ValidationError) -> Any:
    """Return the error to tell of: a name that is not known explains the others."""
    found = error.errors()
    return next((e for e in found if e["type"] in _FIRST), found[0])


def _model_of(model: type[BaseModel], key: str) -> type[BaseModel]:
    annotation: Any = model.model_fields[key].annotation
    return annotation


def _value(path: str, loc: Sequence[Any], found: Any) -> str:
    where = ".".join([path, *(str(part) for part in loc)])
    return f"{where}={found['input']!r}: {found['msg'][0].lower()}{found['msg'][1:]}"
