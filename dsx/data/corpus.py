"""Which files make a corpus, and which of them are held out.

A source is `stdlib` (the Python standard library's own .py files, without its tests) or a path to a
file or a directory. The order is the order of the sources, then sorted relative paths, so the same
files give the same corpus on every machine. Symlinked directories are not entered, hidden entries
are skipped, a file reached twice counts once, so overlapping sources leak nothing into validation.

The split is by whole documents: a hash of the path relative to its source, and of the row where a
file holds one in each, decides, so a document keeps its side when others come or go. Neither side
is ever empty: with at least two documents, the one nearest to the threshold changes sides.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsx.data.documents import files_of_saved_dataset

STDLIB = "stdlib"

_NOT_LIBRARY_DIRS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# Written by the installation, not part of Python's sources: they differ between machines.
_NOT_LIBRARY_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize.", "usercustomize.")


@dataclass(frozen=True)
class CorpusFile:
    """One file: `key` is its path relative to its source, with forward slashes."""

    path: Path
    key: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Corpus:
    """The files of all sources in order; `sources` describes each without an absolute path."""

    sources: tuple[str, ...]
    roots: tuple[Path, ...]
    files: tuple[CorpusFile, ...]
    num_hidden: int
    num_duplicates: int

    def digest(self) -> str:
        """Return a hash of sources, file names, sizes and times: equal if nothing was touched."""
        hasher = blake2b(digest_size=16)
        for text in self.sources:
            hasher.update(f"{text}\0".encode())
        for file in self.files:
            entry = f"{file.key}\0{file.size_bytes}\0{file.modified_ns}\0"
            hasher.update(entry.encode("utf-8", "surrogateescape"))
        return hasher.hexdigest()


def find_corpus(sources: Sequence[str | os.PathLike[str]]) -> Corpus:
    """List the files of `sources`; reads none of them. Raises ValueError for a missing source."""
    if not sources:
        raise ValueError(f"no source given; name {STDLIB!r}, a file or a directory")
    names: list[str] = []
    roots: list[Path] = []
    files: dict[str, CorpusFile] = {}
    num_hidden = num_duplicates = 0
    for source in [os.fspath(source) for source in sources]:
        name, root = _describe(source)
        keys, hidden = _keys(root, is_library=source == STDLIB)
        names.append(name)
        roots.append(root)
        num_hidden += hidden
        for key in keys:
            path = root / key if root.is_dir() else root
            real = os.path.realpath(path)
            if real in files:
                num_duplicates += 1
                continue
            stat = path.stat()
            files[real] = CorpusFile(path, key, stat.st_size, stat.st_mtime_ns)
    return Corpus(tuple(names), tuple(roots), tuple(files.values()), num_hidden, num_duplicates)


def read_text(path: Path) -> str | None:
    """Return the file's text with its line ends as they are, or None if it is not UTF-8 text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def held_out(scores: npt.NDArray[np.float64], fraction: float) -> npt.NDArray[np.bool_]:
    """Return which documents are for validation, of their scores: neither none nor all of them.

    ValueError for less than two.
    """
    if len(scores) < 2:
        raise ValueError(
            f"the sources hold {len(scores)} non-empty UTF-8 document(s), a train and a validation "
            "split need at least 2; add sources or cut the file in parts"
        )
    is_held_out = scores < fraction
    if not is_held_out.any():
        is_held_out[scores.argmin()] = True
    elif is_held_out.all():
        is_held_out[scores.argmax()] = False
    return is_held_out


def require_fraction(validation_fraction: float) -> None:
    """Raise ValueError unless it is a share of the documents."""
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(
            f"validation_fraction={validation_fraction} must lie between 0 and 1; try 0.05"
        )


def score(key: str) -> float:
    """Return a number in [0, 1) that depends on a document's key alone."""
    raw = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(raw, "big") >> 11) / 2**53


def _describe(source: str) -> tuple[str, Path]:
    """Return what dataset.json says of a source, and where it is."""
    if source == STDLIB:
        return f"python-stdlib {platform.python_version()}", Path(sysconfig.get_path("stdlib"))
    root = Path(source).expanduser().resolve()
    if not root.exists():
        raise ValueError(
            f"source {source!r} does not exist; name {STDLIB!r}, an existing file or a directory"
        )
    return root.name or "/", root


def _keys(root: Path, *, is_library: bool) -> tuple[list[str], int]:
    """Return the relative paths of a source's files, sorted, and how many hidden were skipped."""
    if root.is_file():
        return [root.name], 0
    keys: list[str] = []
    num_hidden = 0
    for directory, names in _walk(root, is_library=is_library):
        visible = [name for name in names if not name.startswith(".")]
        num_hidden += len(names) - len(visible)
        for name in files_of_saved_dataset(Path(directory), visible):
            path = Path(directory, name)
            if path.is_file() and not (is_library and _is_foreign_file(name)):
                keys.append(path.relative_to(root).as_posix())
    return sorted(keys), num_hidden


def _walk(root: Path, *, is_library: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield (directory, names to judge); a hidden directory appears as a name and is not entered.

    Raises OSError for a directory that cannot be read: a corpus with silent holes is worse.
    """

    def fail(error: OSError) -> None:
        raise error

    for directory, subdirectories, names in os.walk(root, onerror=fail):
        hidden = [name for name in subdirectories if name.startswith(".")]
        subdirectories[:] = sorted(
            name
            for name in subdirectories
            if not name.startswith(".") and not (is_library and _is_foreign_dir(name))
        )
        yield directory, hidden + names


def _is_foreign_dir(name: str) -> bool:
    return name in _NOT_LIBRARY_DIRS or name.startswith(_NOT_LIBRARY_PREFIXES)


def _is_foreign_file(name: str) -> bool:
    return not name.endswith(".py") or name.startswith(_NOT_LIBRARY_PREFIXES)
