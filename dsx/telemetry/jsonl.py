"""A file of JSON lines that a resumed run goes on with: the records of steps taken again go."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)


def reopen(path: Path, step: int | None) -> TextIO:
    """Open for appending after the records up to `step`; the others are dropped, atomically.

    None: after all there are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if step is None:
        return path.open("a")
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(_lines_up_to(path, step)))
    rewritten.replace(path)
    return path.open("a")


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept: list[str] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            logger.warning("dropping an incomplete record from %s", path)
            continue
        if record.get("step", record.get("applied_step", 0)) <= step:
            kept.append(line.decode())
    return kept
