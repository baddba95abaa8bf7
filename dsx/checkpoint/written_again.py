"""What a tag held before it was written again: for clusters that have not got as far.

`<tag>.replaced` is what it held last. `<tag>.held.replaced` is older: what all clusters are known
to hold of it, where they are not known to hold anything later, or, where nothing is known, what
they most likely hold (`hold_back`). A cluster that saves on while another's saves fail, or come
late, so keeps the last that both have.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from dsx.checkpoint.checksums import DAMAGED, HELD, MANIFEST, REPLACED, read_manifest
from dsx.checkpoint.tags import sync_to_disk


class Version(NamedTuple):
    """What a tag holds, or held: of which step, and of which start of a run."""

    step: int
    session: str


def versions(directory: Path, tag: str) -> dict[str, Version]:
    """Return what is complete under the name of a tag, by folder, the last first."""
    found: dict[str, Version] = {}
    for name in (tag, f"{tag}{REPLACED}", f"{tag}{HELD}"):
        version = version_of(directory / name)
        if version is not None:
            found[name] = version
    return found


def version_of(path: Path) -> Version | None:
    """Return what a folder holds; None where it is not complete, or its manifest is damaged."""
    manifest = path / MANIFEST
    if not manifest.is_file() or DAMAGED in (told := read_manifest(manifest)):
        return None
    return Version(told["step"], told.get("session", ""))


def hold_back(
    directory: Path,
    tag: str,
    known: Version | None,
    before: Collection[Version] = (),
    is_failing: Callable[[int], bool] = lambda step: False,
) -> None:
    """Let what all clusters hold of a tag stay as that is written again; OSError.

    `known`: which that is. None: not known, so the first stays that this process has saved (what
    was there `before` is not its own), unless `is_failing` says of its step that a cluster has none
    of it; and where there is no such one, the oldest of before. Killed meanwhile, what stays is
    complete under either name.
    """
    found = versions(directory, tag)
    replaced, held = f"{tag}{REPLACED}", f"{tag}{HELD}"
    if known is not None:
        last = next((name for name, version in found.items() if version == known), held)
    else:
        older = [name for name in (held, replaced) if name in found]
        own = [n for n in older if found[n] not in before and not is_failing(found[n].step)]
        last = next(iter(own + [name for name in older if found[name] in before]), tag)
    if last == held:
        return
    _remove(directory / held)
    if last == replaced:
        (directory / replaced).rename(directory / held)
    sync_to_disk(directory)


def put_back(directory: Path, tag: str, held: str) -> bool:
    """Give what a tag held before it was written again its name; what it holds now goes. OSError.

    `held` is the folder that has it. Killed meanwhile, it is complete under either name. Return
    whether there is such a one.
    """
    before, final = directory / held, directory / tag
    if not (before / MANIFEST).is_file():
        return False
    _remove(final)
    before.rename(final)
    sync_to_disk(directory)
    return True


def _remove(tag: Path) -> None:
    """Delete a tag; killed meanwhile, it leaves nothing that looks complete."""
    if tag.exists():
        (tag / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(tag)
