"""Checksums of the files of an outer state: a bit that has flipped is refused, not trained on.

A rank leaves the SHA-256 of its file beside it, as `sha256sum` writes it. Where a tag is completed,
`dsx.json` takes these in, with those of the small files beside them and one of its own, and those
of the files of plain PyTorch below it. At a load the ranks of a cluster read a share of the files
each and agree before anything is changed.

A state of dsx 0.2 or earlier has none: a warning says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsx.core.progress import SOON, Progress

MANIFEST = "dsx.json"
UNFINISHED, REPLACED, REMOVED = ".unfinished", ".replaced", ".removed"
HELD = f".held{REPLACED}"  # see written_again.py
WRITER = ".writing"  # names the process that writes to a folder of tags
OF_TORCH = "torch"  # the folder of what plain PyTorch trains: its ranks leave checksums, too
DAMAGED = "damaged"  # in place of what a manifest held
_SUFFIX = ".sha256"
_FILES, _SIZES, _OWN = "checksums", "sizes", "checksum"
_CHUNK_BYTES = 1 << 20
logger = logging.getLogger(__name__)


def checksum(path: Path, moved: Callable[[int], object] = lambda num_bytes: None) -> str:
    """Return the SHA-256 of a file's content; `moved` is told how many bytes have been read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            moved(len(chunk))
    return digest.hexdigest()


def note_checksum(path: Path, digest: str) -> None:
    """Write the checksum of a file that has just been written, beside it."""
    path.with_name(path.name + _SUFFIX).write_text(f"{digest}  {path.name}\n")


def take_checksums(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the checksums of a tag and its own; removes those left by ranks.

    Of the engine's files it has the sizes.
    """
    files = {path.name: checksum(path) for path in sorted(directory.glob("*.json"))}
    for folder in (directory, directory / OF_TORCH):
        for left in sorted(folder.glob(f"*{_SUFFIX}")):
            name, digest = _read_left(left)
            files[(folder / name).relative_to(directory).as_posix()] = digest
            left.unlink()
    paths = {path.relative_to(directory).as_posix(): path for path in files_below(directory)}
    sizes = {
        name: path.stat().st_size
        for name, path in sorted(paths.items())
        if name not in files or "/" in name
    }
    return sealed({**manifest, _FILES: files, _SIZES: sizes})


def name_of(tag: str) -> str:
    """Return the name under which what a folder holds was saved, written again since or not."""
    return tag.removesuffix(HELD if tag.endswith(HELD) else REPLACED)


def files_below(tag: Path) -> list[Path]:
    """Return the files of a tag, in no order; of tags within it, what is complete."""
    left = (UNFINISHED, REPLACED, REMOVED)
    return [
        path
        for path in tag.rglob("*")
        if path.is_file()
        and path.name != WRITER
        and not any(part.endswith(left) for part in path.relative_to(tag).parts[:-1])
    ]


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the checksum of what it holds now."""
    values = {key: value for key, value in manifest.items() if key != _OWN}
    return {**values, _OWN: of_manifest(values)}


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a `dsx.json` says of its tag; what is wrong with it, under `DAMAGED`."""
    try:
        text = path.read_text()
    except ValueError as error:
        return {DAMAGED: f"{path} cannot be read ({error})"}
    return manifest_of_text(text, str(path))


def manifest_of_text(text: str, where: str) -> dict[str, Any]:
    """Return the same of the content of a `dsx.json` at `where`."""
    try:
        manifest = json.loads(text)
        expected = manifest.pop(_OWN, None)
    except (ValueError, AttributeError, TypeError) as error:  # no JSON, or that of no object
        return {DAMAGED: f"{where} cannot be read ({error})"}
    if (expected or _FILES in manifest) and expected != of_manifest(manifest):
        return {DAMAGED: f"{where} has changed since it was written: its checksum is another"}
    manifest.pop(_FILES, None)
    manifest.pop(_SIZES, None)
    return manifest


def files_of(manifest: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the checksums that a whole manifest holds, and the sizes of the engine's files."""
    return dict(manifest.get(_FILES) or {}), dict(manifest.get(_SIZES) or {})


def with_sizes(manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return a whole manifest that has these sizes of the engine's files."""
    return sealed({**manifest, _SIZES: dict(sizes)})


def require_intact(directory: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Raise ValueError if a file of the outer state is not as it was saved; of a share of them.

    A rank's own file is in its share, of `num_ranks`.
    """
    expected = _expected(directory)
    if expected is None:
        if rank == 0:
            logger.warning(
                "%s has no checksums, as dsx 0.2 wrote none: a file that has changed since would "
                "not be seen; the next save has them", directory,
            )  # fmt: skip
        return
    outer = {name: digest for name, digest in expected.items() if "/" not in name}
    _compare(directory, outer, rank, num_ranks)


def _compare(directory: Path, expected: Mapping[str, str], rank: int, num_ranks: int) -> None:
    """Raise ValueError where a file that is there has another checksum; of a share of them."""
    own = sorted(expected, key=lambda n: (n.endswith(".json"), n))[rank::num_ranks]
    sizes = [path.stat().st_size for name in own if (path := directory / name).exists()]
    what = f"comparing {directory} with its checksums"
    progress = Progress(what, sum(sizes), rank == 0, first_seconds=SOON)
    for name in own:
        path = directory / name
        if path.exists() and checksum(path, progress.moved) != expected[name]:
            raise ValueError(
                f"{path} has changed since it was saved: its SHA-256 is not {expected[name]}; "
                f"{earlier_tags(directory)}"
            )


def find_damage(directory: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Say what is wrong with the files of a tag, the engine's included; of `num_ranks`, a share.

    Of the engine's files the sizes are known, and of plain PyTorch's the checksums; in DeepSpeed's
    and Megatron's torch keeps checks of its own.
    """
    try:
        require_intact(directory, rank, num_ranks)
        files, sizes = files_of(json.loads((directory / MANIFEST).read_text()))
        lost = [name for name in files if not (directory / name).is_file()]
        if lost:
            return f"{directory / lost[0]} is gone"
        for name, size in list(sizes.items())[rank::num_ranks]:
            _require_whole(directory / name, size, has_checksum=name in files)
        _compare(directory, {n: files[n] for n in files if "/" in n}, rank, num_ranks)
    except (OSError, ValueError) as error:
        return str(error).split("; load an earlier checkpoint")[0]
    return None


def _require_whole(path: Path, size: int, has_checksum: bool) -> None:
    """Raise ValueError if a file has another size, or is a zip, as torch's are, with other bits.

    A file with a checksum is left to that: plain PyTorch's are many zips in a row. So is the
    manifest of a tag within, which may come to say more than it did: that training had diverged.
    """
    if path.name == MANIFEST and path.is_file():
        if why := read_manifest(path).get(DAMAGED):
            raise ValueError(why)
        return
    if not path.is_file() or path.stat().st_size != size:
        held = f"{path.stat().st_size:,} bytes" if path.is_file() else "nothing"
        raise ValueError(f"{path} holds {held}, and {size:,} bytes were saved")
    if not has_checksum and zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as file:
                broken = file.testzip()
        except zipfile.BadZipFile as error:
            broken = str(error)
        if broken:
            raise ValueError(f"{path} has changed since it was saved ({broken})")


def earlier_tags(directory: Path) -> str:
    """Return what to do where a tag is damaged."""
    manifests = sorted(directory.parent.glob(f"*/{MANIFEST}"), key=lambda p: p.stat().st_mtime)
    tags = [
        manifest.parent.name
        for manifest in manifests
        if manifest.parent != directory and not manifest.parent.name.endswith(UNFINISHED)
    ]
    there = f"there: {', '.join(tags)}" if tags else "there is none beside it"
    return f"load an earlier checkpoint, in all clusters ({there}), or an intact copy of this one"


def _expected(directory: Path) -> dict[str, str] | None:
    """Return the checksums by file; None if the state has none."""
    manifest = directory / MANIFEST
    if manifest.is_file():
        told = read_manifest(manifest)
        if DAMAGED in told:
            raise ValueError(f"{told[DAMAGED]}; {earlier_tags(directory)}")
        files: dict[str, str] | None = json.loads(manifest.read_text()).get(_FILES)
        return files
    return dict(_read_left(path) for path in sorted(directory.glob(f"*{_SUFFIX}"))) or None


def _read_left(path: Path) -> tuple[str, str]:
    """Return of which file a checksum is that a rank has left, and what it is."""
    name = path.name.removesuffix(_SUFFIX)
    digest, _, of = path.read_text(errors="replace").strip().partition("  ")
    if of != name:
        raise ValueError(
            f"{path} has changed since it was saved: it does not hold the checksum of {name}; "
            f"{earlier_tags(path.parent)}"
        )
    return name, digest


def of_manifest(values: Mapping[str, Any]) -> str:
    """Return the checksum of what a `dsx.json` holds beside it."""
    return of_text(json.dumps(values, sort_keys=True))


def of_text(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
