"""The newest checkpoint of a folder, copied to object storage by fsspec, complete or not at all.

A tag's manifest is copied last: one without is not complete, whatever else is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import DAMAGED, MANIFEST
from dsx.checkpoint.tags import complete_tags
from dsx.core.units import format_bytes

_TELL_SECONDS = 5.0


def open_target(url: str) -> tuple[Any, str]:
    """Return a file system and the folder there; ValueError says what is missing for it."""
    try:
        import fsspec.core
    except ModuleNotFoundError as error:
        raise ValueError(f"--to {url} needs fsspec: pip install fsspec ({error})") from None
    try:
        found: Any = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"--to {url}: {error}") from None
    return found


def newest_tags(checkpoints: Path) -> list[Path]:
    """Return the newest complete tag of each cluster's folder below a directory."""
    found: list[Path] = []
    for folder in sorted(checkpoints.glob("cluster_*")):
        tags = {t: m for t, m in complete_tags(folder).items() if DAMAGED not in m}
        if tags:
            found.append(folder / max(tags, key=lambda tag: (tags[tag]["step"], tag)))
    return found


def copy_newest(checkpoints: Path, url: str, say: Callable[[str], object]) -> list[str]:
    """Copy the newest tags to `url`/cluster_<m>/<tag>; return where they are. OSError if it fails.

    `say` hears how far it is. FileNotFoundError where there is none.
    """
    target, root = open_target(url)
    tags = newest_tags(checkpoints)
    if not tags:
        raise FileNotFoundError(f"{checkpoints} holds no complete checkpoint to copy")
    copied: list[str] = []
    for tag in tags:
        there = f"{root.rstrip('/')}/{tag.parent.name}/{tag.name}"
        files = sorted(
            (path for path in tag.rglob("*") if path.is_file()),
            key=lambda path: (path.name == MANIFEST and path.parent == tag, str(path)),
        )
        total, done, told = sum(path.stat().st_size for path in files), 0, time.monotonic()
        for number, path in enumerate(files, 1):
            name = f"{there}/{path.relative_to(tag).as_posix()}"
            target.makedirs(name.rpartition("/")[0], exist_ok=True)
            target.put_file(str(path), name)
            done += path.stat().st_size
            if time.monotonic() > told + _TELL_SECONDS:
                told = time.monotonic()
                say(
                    f"{number} of {len(files)} files, {format_bytes(done)} of {format_bytes(total)}"
                )
        copied.append(f"{url.rstrip('/')}/{tag.parent.name}/{tag.name}")
        say(f"{tag}: {len(files)} files, {format_bytes(total)}, are at {copied[-1]}")
    return copied
