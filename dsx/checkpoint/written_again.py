"""What a tag held before it was written again: for clusters that have not got as far.

`<tag>.replaced` is what it held last. `<tag>.held.replaced` is older: what all clusters are known
to hold of it, where they are not known to hold anything later. A cluster that saves on while
another's saves fail, or come late, so never deletes the last that both have.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dsx.checkpoint.checksums import DAMAGED, HELD, MANIFEST, REPLACED, read_manifest
from dsx.checkpoint.tags import sync_to_disk


def versions(directory: Path, tag: str) -> dict[str, int]:
    """Return the steps of what is complete under the name of a tag, by folder, the last first."""
    found: dict[str, int] = {}
    for name in (tag, f"{tag}{REPLACED}", f"{tag}{HELD}"):
        manifest = directory / name / MANIFEST
        if manifest.is_file() and DAMAGED not in (told := read_manifest(manifest)):
            found[name] = told["step"]
    return found


def hold_back(directory: Path, tag: str, known: int | None) -> None:
    """Let what all clusters hold of a tag stay as that is written again; OSError.

    `known`: of which step that is; None: not known, so the oldest that is there stays. Killed
    meanwhile, what stays is complete under either name.
    """
    steps = versions(directory, tag)
    replaced, held = f"{tag}{REPLACED}", f"{tag}{HELD}"
    last = min(steps, key=lambda name: steps[name], default=tag)
    if known is not None:
        last = next((name for name, step in steps.items() if step == known), held)
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
