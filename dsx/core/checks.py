"""What every message about a wrong value needs: what is allowed, and what is nearest to it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args


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
