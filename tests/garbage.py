"""How often Python looks for cyclic garbage, of which tests make little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTS_AFTER = (20_000, 20, 20)  # objects of tests and ranks, where Python says (700, 10, 10)


@contextmanager
def not_collecting() -> Iterator[None]:
    """Make objects that stay, e.g. syntax trees: each look through them takes longer than the last.

    Parsing all sources takes three times as long with collections as without.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
