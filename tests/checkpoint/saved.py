"""Outer state that is written at once, where an engine would."""

from __future__ import annotations

from typing import Any

from dsx.checkpoint.outer_state import take_snapshot


def save_state(*given: Any, **more: Any) -> None:
    """Take a snapshot, and write it."""
    take_snapshot(*given, **more).write()
