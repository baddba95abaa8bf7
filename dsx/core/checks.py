"""One check that every axis needs: a value of a `Literal` field is one of those it names.

JSON configs are checked by their schema; this serves methods that are built in Python.
"""

from __future__ import annotations

from typing import Any, get_args


def require_choice(key: str, value: Any, literal: Any) -> None:
    """Raise ValueError unless `value` is one of the values of `literal`, a `Literal[...]`."""
    allowed = get_args(literal)
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{key}={value!r} is not known; allowed: {names}")
