"""Old spellings of the "dsx" block, of its flags, and of blocks kept in checkpoints and records.

Each was documented once and goes on working; where a user wrote it, one warning names the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.core.registry import FORMER, SELECTORS
from dsx.core.renamed import warn_renamed


def with_new_names(axis: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user wrote for an axis with today's names; warns of old ones."""
    selector = SELECTORS[axis]
    renamed = _renamed(axis, given)
    if renamed != given:
        key = f"dsx.{axis}.{selector}"
        warn_renamed(f"{key}={given[selector]!r}", repr(renamed[selector]))
    return renamed


def stored_axes(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes kept by a checkpoint or record with today's names, without a word."""
    return {axis: _renamed(axis, choice) for axis, choice in axes.items()}


def _renamed(axis: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    selector = SELECTORS.get(axis, "")
    name = choice.get(selector)
    new = FORMER.get(axis, {}).get(name) if isinstance(name, str) else None
    return {**choice, selector: new} if new else dict(choice)
