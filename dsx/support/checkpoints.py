"""Which checkpoints a run has: their steps, files and sizes; nothing of what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from dsx.checkpoint.checksums import MANIFEST, UNFINISHED, read_manifest

_MOST_TAGS = 200  # the newest
_MOST_FILES = 300  # of a tag
_LEVELS = ("", "*/", "*/*/", "*/*/dsx/")  # from the run's folder to one that holds cluster_0


def checkpoints_of(folder: Path, abouts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what lies below each directory of checkpoints, the newest tag first.

    Directories are those that run.json names, wherever they are, and those in the run's folder.
    What is unfinished or damaged is there, too, and says so.
    """
    named = {
        (folder / str(entry.get("path"))).parent
        for about in abouts
        for entry in _entries(about)
        if entry.get("path")
    }
    found = {path.resolve() for level in _LEVELS for path in folder.glob(f"{level}cluster_*")}
    clusters = {path for path in {p.resolve() for p in named} | found if path.is_dir()}
    tags = [tag for cluster in clusters for tag in _subfolders(cluster)]
    tags.sort(key=lambda tag: (_changed(tag), str(tag)), reverse=True)
    return [_describe(tag, folder) for tag in tags[:_MOST_TAGS]]


def _entries(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries: Any = about.get("checkpoints")
    if not isinstance(entries, list):
        return []
    return [cast("Mapping[str, Any]", e) for e in entries if isinstance(e, dict)]  # pyright: ignore


def _subfolders(cluster: Path) -> list[Path]:
    return [p for p in cluster.iterdir() if p.is_dir() and _is_tag(p)]


def _is_tag(path: Path) -> bool:
    return (path / MANIFEST).is_file() or path.name.endswith(UNFINISHED)


def _describe(tag: Path, folder: Path) -> dict[str, Any]:
    files = {str(p.relative_to(tag)): _size(p) for p in sorted(tag.rglob("*")) if p.is_file()}
    told: dict[str, Any] = {
        "path": str(tag.relative_to(folder) if tag.is_relative_to(folder) else tag),
        "is_unfinished": tag.name.endswith(UNFINISHED),
        "bytes": sum(files.values()),
        "num_files": len(files),
        "files": dict([*files.items()][:_MOST_FILES]),
    }
    if (tag / MANIFEST).is_file():
        try:
            told["manifest"] = read_manifest(tag / MANIFEST)
        except OSError as error:
            told["manifest"] = str(error)
    return told


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # the run goes on meanwhile
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def as_text(value: Any) -> str:
    """Return a JSON document that people read."""
    return json.dumps(value, indent=1, default=str) + "\n"
