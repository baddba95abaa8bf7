"""The newest checkpoint of a folder, copied to a remote place after a notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dsx.checkpoint.checksums import DAMAGED
from dsx.checkpoint.remote import Changed, Remote, files_in
from dsx.checkpoint.tags import complete_tags
from dsx.core.progress import SOON, Progress
from dsx.core.units import format_bytes

OPTION = "--to"


def newest_tags(checkpoints: Path) -> list[Path]:
    """Return the newest complete tag of each cluster's folder below a directory."""
    found: list[Path] = []
    for folder in sorted(checkpoints.glob("cluster_*")):
        tags = {t: m for t, m in complete_tags(folder).items() if DAMAGED not in m}
        if tags:
            found.append(folder / max(tags, key=lambda tag: (tags[tag]["step"], tag)))
    return found


def copy_newest(checkpoints: Path, remote: Remote, say: Callable[[str], object]) -> list[str]:
    """Copy the newest tags to `<url>/cluster_<m>/<tag>`; return where they are.

    `say` hears of each. FileNotFoundError where there is none, OSError where one has changed
    meanwhile; what else a file system raises where it cannot be reached is of many kinds.
    """
    tags = newest_tags(checkpoints)
    if not tags:
        raise FileNotFoundError(f"{checkpoints} holds no complete checkpoint to copy")
    copied: list[str] = []
    for tag in tags:
        place = remote.place_of(tag)
        files = files_in(tag)
        total = sum(path.stat().st_size for path in files)
        progress = Progress(f"copying to {place}", total, True, first_seconds=SOON)
        try:
            remote.copy(tag, progress.moved)
        except Changed as error:
            raise OSError(str(error)) from error
        copied.append(place)
        say(f"{tag}: {len(files)} files, {format_bytes(total)}, are at {place}")
    return copied
