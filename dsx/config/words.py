"""What a key may hold, in words, and what to write in place of the rest: from its JSON Schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_Schema = Mapping[str, Any]
_LIMITS = {
    "minimum": "at least", "exclusiveMinimum": "above",
    "maximum": "at most", "exclusiveMaximum": "below",
}  # fmt: skip
_TYPES = {
    "integer": "a whole number", "number": "a finite number", "string": "a text",
    "boolean": "true or false", "null": "null", "object": "an object",
}  # fmt: skip


def schema_at(schema: _Schema, path: Sequence[Any]) -> _Schema:
    """Return what a model's JSON Schema says of the value at a path of keys and positions."""
    definitions = schema.get("$defs", {})
    for part in path:
        schema = _alternative(schema, "array" if isinstance(part, int) else "object")
        if isinstance(part, int):
            items = schema.get("prefixItems", ())
            schema = items[part] if part < len(items) else schema.get("items", {})
        else:
            schema = schema.get("properties", {}).get(part, {})
        reference = schema.get("$ref")
        schema = definitions[reference.rsplit("/", 1)[-1]] if reference else schema
    return schema


def allowed(schema: _Schema) -> str:
    """Return what is allowed: "a whole number of at least 1", "'a' or 'b'", "a list of texts"."""
    if "anyOf" in schema:
        return ", or ".join(allowed(one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        *names, last = [repr(v) for v in schema.get("enum", [schema.get("const")])]
        return f"{', '.join(names)} or {last}" if names else last
    if schema.get("type") == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        count = f"{schema['maxItems']} entries" if "maxItems" in schema else "entries"
        return f"a list of {count}, each {allowed(items)}"
    if "$ref" in schema:
        return "an object"
    limits = [f"{words} {_number(schema[key])}" for key, words in _LIMITS.items() if key in schema]
    if "minLength" in schema:
        limits.append("that is not empty")
    of = "of " if limits and limits[0].startswith("at ") else ""
    kind = _TYPES.get(schema.get("type", ""), "another value")
    return f"{kind} {of}{' and '.join(limits)}".strip()


def instead(schema: _Schema, value: Any) -> str | None:
    """Return what to write for a value that was meant well, as JSON; None if that is not plain."""
    for candidate in _meant(value):
        if fits(schema, candidate) and len(json.dumps(candidate)) < 80:
            return json.dumps(candidate)
    return None


def example(schema: _Schema) -> str:
    """Return some value that is allowed, as JSON: the default, or the least."""
    if schema.get("examples") or schema.get("default") is not None:
        return json.dumps(schema.get("examples", [schema.get("default")])[0])
    candidates = [1, 1.0, 0.5, *schema.get("enum", ()), "text", True, [], {}]
    least = schema.get("minimum")
    return json.dumps(next((c for c in [least, *candidates] if fits(schema, c)), None))


def fits(schema: _Schema, value: Any) -> bool:
    """Return whether a value is one that the schema of a key allows."""
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")]) and isinstance(value, str | int)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        of_kind = isinstance(value, int if kind == "integer" else int | float)
        return of_kind and not isinstance(value, bool) and _is_within(schema, value)
    if kind == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        is_list = isinstance(value, list) and all(fits(items, one) for one in value)
        most = schema.get("maxItems", math.inf)
        return is_list and schema.get("minItems", 0) <= len(value) <= most
    if kind == "string":
        return isinstance(value, str) and len(value) >= schema.get("minLength", 0)
    if kind == "boolean":
        return isinstance(value, bool)
    return value is None if kind == "null" else kind == "object" and isinstance(value, dict)


def _meant(value: Any) -> list[Any]:
    """Return what a value of another type may have been meant to be, likeliest first."""
    if isinstance(value, str):
        try:
            read = json.loads(value.strip().lower()) if len(value) < 100 else None
        except (ValueError, RecursionError):
            read = None
        return [read, [value]] if read is not None else [[value]]
    if isinstance(value, float) and math.isfinite(value) and abs(value) < 2**53:
        return [round(value), value]
    if isinstance(value, int) and not isinstance(value, bool):
        return [bool(value), str(value), [value]] if value in (0, 1) else [str(value), [value]]
    return [value[0]] if isinstance(value, list) and len(value) == 1 else []


def _is_within(schema: _Schema, value: float) -> bool:
    return (
        math.isfinite(value)
        and value >= schema.get("minimum", -math.inf)
        and value > schema.get("exclusiveMinimum", -math.inf)
        and value <= schema.get("maximum", math.inf)
        and value < schema.get("exclusiveMaximum", math.inf)
    )


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 10**6 else f"{value:,.0f}"


def _alternative(schema: _Schema, kind: str) -> _Schema:
    return next((one for one in schema.get("anyOf", ()) if one.get("type") == kind), schema)
