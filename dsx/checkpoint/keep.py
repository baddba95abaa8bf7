"""Which checkpoints of a cluster may go, where a run keeps the last few of them.

What counts is good and complete in all clusters; what is older than the last K of these goes. So
neither the last good one is deleted, nor one that another cluster may still need: a cluster that
died while saving, or whose values are not finite, lets the others keep what they have.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import DAMAGED, MANIFEST, REMOVED, REPLACED, name_of
from dsx.checkpoint.tags import Manifests


def superfluous(manifests: Manifests, common: Mapping[str, int], keep: int) -> list[str]:
    """Return the tags that may go, the oldest first; all clusters have those in `common` complete.

    As of the step that it says: what a tag holds besides, written again, does not count. What holds
    the finished model stays, and so does what cannot be read.
    """
    known = {tag: manifest for tag, manifest in manifests.items() if DAMAGED not in manifest}
    good = [
        tag
        for tag, step in common.items()
        if tag in known and known[tag]["step"] == step and counts(known[tag])
    ]
    steps = sorted({known[tag]["step"] for tag in good}, reverse=True)
    if len(steps) < keep:
        return []
    oldest = steps[keep - 1]
    gone = [
        tag
        for tag, manifest in known.items()
        if (manifest["step"] < oldest and not manifest.get("is_finished"))
        or (tag.endswith(REPLACED) and name_of(tag) in good)
    ]
    return sorted(gone, key=lambda tag: known[tag]["step"])


def counts(manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of a cluster is one that the last good ones may be deleted for."""
    return manifest.get("trouble") == "" and not manifest.get("is_doubtful")


def remove_tag(directory: Path, tag: str) -> None:
    """Delete a tag of a cluster; killed meanwhile, it leaves nothing that looks complete."""
    delete_taken(take_away(directory, tag))


def take_away(directory: Path, tag: str) -> Path:
    """Let a tag be none any more, at once; return what `delete_taken` deletes."""
    path, removed = directory / tag, directory / f"{tag}{REMOVED}"
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    return removed


def delete_taken(removed: Path) -> None:
    """Delete what was taken away, which may take long; OSError."""
    shutil.rmtree(removed, ignore_errors=True)  # a save that begins removes leftovers, too
    if removed.exists():
        raise OSError(f"{removed} cannot be deleted as a whole")
