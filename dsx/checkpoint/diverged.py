"""Checkpoints that were saved while training diverged: their manifests come to say so.

That it diverged is known only some steps later. What was saved since the first bad loss is then no
more than a complete checkpoint: no run goes on from it by itself (choice.py), and it does not count
among the last few (keep.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from dsx.checkpoint.checksums import DAMAGED, MANIFEST, sealed
from dsx.checkpoint.tags import complete_tags, write_durably


def trouble_since(step: int) -> str:
    """Return what a manifest says of a time when training had diverged."""
    return f"diverged since step {step}"


def mark_diverged(directory: Path, since: int, session: str) -> list[str]:
    """Enter the trouble of what a run has saved since a step; return these tags of a cluster.

    On one rank of the cluster. Each manifest is written as a whole or left as it was.
    """
    marked: list[str] = []
    for tag, manifest in sorted(complete_tags(directory).items()):
        is_of_run = DAMAGED not in manifest and manifest["session"] == session
        if not is_of_run or manifest["step"] < since or manifest.get("trouble"):
            continue
        path = directory / tag / MANIFEST
        try:
            values = json.loads(path.read_text())
            write_durably(path, json.dumps(sealed({**values, "trouble": trouble_since(since)})))
        except FileNotFoundError:
            continue  # it has been deleted meanwhile
        marked.append(tag)
    return marked
