"""What a killed start has left half written in a run's folder, which the next one removes."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

_NAME = re.compile(
    r"(?:(?:metrics(?:\.cluster_(\d+))?)|(?:run(?:\.cluster_(\d+))?\.json)|"
    r"(?:trace\.cluster_(\d+)\.rank_\d+))\.tmp"
)
_YOUNG_SECONDS = 60.0  # such a file is there for the moment in which another is replaced


def remove_leftovers(folder: Path, cluster: int) -> None:
    """Remove a cluster's own temporary files, but for those that something may be writing now."""
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[match.lastindex] if match.lastindex else 0) != cluster:
            continue
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _YOUNG_SECONDS:
                path.unlink()
