"""Old spellings of the "dsx" block, of its flags, and of blocks kept in checkpoints and records.

Each was documented once and goes on working; where a user wrote it, one warning names the new one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.core.registry import FORMER, SELECTORS
from dsx.core.renamed import warn_renamed


def with_new_names(axis: str, given: Mapping[str, Any], file: str | None = None) -> dict[str, Any]:
    """Return what a user wrote for an axis with today's names; warns of old ones.

    `file` is the JSON they were read from, or the command line; None: the program gave them.
    """
    selector = SELECTORS[axis]
    renamed = _renamed(axis, given)
    if renamed != given:
        old, new = given[selector], renamed[selector]
        line = _line_of(file, axis, selector, old)
        warn_renamed(f"dsx.{axis}.{selector}={old!r}", repr(new), file, line)
    return renamed


def _line_of(file: str | None, axis: str, selector: str, name: str) -> int:
    """Return the line of a JSON file where a choice is named, the first if that is not found."""
    if file is None or not Path(file).is_file():
        return 1
    said = rf'"{axis}"\s*:\s*{{[^{{}}]*"{selector}"\s*:\s*"{name}"'
    text = Path(file).read_text()
    found = re.search(said, text)
    return 1 + text.count("\n", 0, found.end()) if found else 1


def stored_axes(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes kept by a checkpoint or record with today's names, without a word."""
    return {axis: _renamed(axis, choice) for axis, choice in axes.items()}


def _renamed(axis: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    selector = SELECTORS.get(axis, "")
    name = choice.get(selector)
    new = FORMER.get(axis, {}).get(name) if isinstance(name, str) else None
    return {**choice, selector: new} if new else dict(choice)
