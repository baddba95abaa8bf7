"""What an engine keeps of a checkpoint in a folder of its own, not in the tag's directory.

A copy at a remote place has it below the tag, in `engine/`, and its manifest names those files with
the engine's others. It comes with the tag, or not at all. What was fetched goes to the engine's
folder, and the tag's manifest is again what it was before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dsx.checkpoint.checksums import files_of, with_sizes

FOLDER = "engine"


class OwnPart(Protocol):
    """An engine's own part of each tag, which an engine may complete later than dsx does its."""

    def folder(self, tag: str) -> Path:
        """Return where the engine keeps it."""
        ...

    def is_complete(self, tag: str) -> bool:
        """Whether it is whole there; from any thread."""
        ...

    def place(self, tag: str, fetched: Path) -> None:
        """Take what was fetched to where the engine looks for it, complete; OSError if it cannot.

        Nothing is changed where it is complete there already.
        """
        ...


def files_of_part(part: OwnPart, tag: str) -> dict[str, Path]:
    """Return the files of an engine's own part by their names below the tag's directory."""
    folder = part.folder(tag)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"{FOLDER}/{path.relative_to(folder).as_posix()}": path for path in paths}


def with_part(manifest: bytes, sizes: Mapping[str, int]) -> bytes:
    """Return a manifest that names the files of an engine's own part, too."""
    told = json.loads(manifest)
    _, own = files_of(told)
    return json.dumps(with_sizes(told, {**own, **sizes})).encode()


def without_part(manifest: bytes) -> bytes:
    """Return the manifest as it is on a disk."""
    told = json.loads(manifest)
    _, sizes = files_of(told)
    own = {name: size for name, size in sizes.items() if not name.startswith(f"{FOLDER}/")}
    return json.dumps(with_sizes(told, own)).encode()


def sizes_of_part(manifest: bytes) -> dict[str, int]:
    """Return the files of an engine's own part that a manifest names, with their sizes."""
    _, sizes = files_of(json.loads(manifest))
    return {name: size for name, size in sizes.items() if name.startswith(f"{FOLDER}/")}
