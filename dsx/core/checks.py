"""What every message about a wrong value needs: what is allowed, and what is nearest to it."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from dataclasses import astuple
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

_LIMITS = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return the end of a message: the allowed word nearest to `word`, if any, and all of them."""
    words = list(allowed)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} Allowed: {', '.join(words)}"


def require_choice(key: str, value: Any, literal: Any) -> None:
    """Raise ValueError unless `value` is one of the values of `literal`, a `Literal[...]`.

    JSON configs are checked by their schema; this serves methods that are built in Python.
    """
    allowed = get_args(literal)
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{key}={value!r} is not known; allowed: {names}")


def require_bounds(section: str, choice: Any) -> None:
    """Raise ValueError for a field of a dataclass that is outside of what its annotation says.

    `Annotated[float, Gt(0), Le(1), "it is a share"]` is refused with the text as the reason; from
    the same annotation the JSON Schema has its limits. None passes.
    """
    for name, annotation in _annotations(type(choice)).items():
        _require(f"{section}.{name}", getattr(choice, name), annotation)


@lru_cache(maxsize=128)
def _annotations(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in getattr(kind, "__dataclass_fields__", ())}


def _require(key: str, value: Any, annotation: Any) -> None:
    if get_origin(annotation) is tuple and value is not None:
        kinds = get_args(annotation)
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        for index, (one, kind) in enumerate(zip(value, kinds, strict=True)):
            _require(f"{key}[{index}]", one, kind)
    if get_origin(annotation) in (Union, UnionType) and isinstance(value, int | float):
        for part in get_args(annotation):
            _require(key, value, part)
    if get_origin(annotation) is not Annotated or value is None:
        return
    said: list[Any] = []
    for x in annotation.__metadata__:  # an Interval is a group of limits, pydantic's Field another
        said += x if isinstance(x, GroupedMetadata) else getattr(x, "metadata", [x])
    limits = [(*_LIMITS[type(x)], astuple(x)[0]) for x in said if type(x) in _LIMITS]
    if not limits:
        return
    is_float = float in (annotation.__origin__, *get_args(annotation.__origin__))
    if all(holds(value, limit) for holds, _, limit in limits) and math.isfinite(value):
        return
    allowed = " and ".join(f"{words} {limit:g}" for _, words, limit in limits)
    if is_float and len(limits) == 1:
        words = "a finite number" if allowed.startswith("above") else "finite and"
        allowed = f"{words} {allowed}"
    why = "".join(f": {text}" for text in annotation.__metadata__ if isinstance(text, str))
    raise ValueError(f"{key}={value} must be {allowed}{why}")
