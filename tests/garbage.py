"""When Python does not look for cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def not_collecting() -> Generator[None, None, None]:
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
