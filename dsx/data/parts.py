"""A corpus cut into parts, which several processes encode; the same parts however many they are.

A part is a run of files, or a stretch of one that is large and has rows. Its name is a hash of all
that its tokens follow from, so that a build that was killed finds which of them are finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dsx.data.corpus import Corpus, CorpusFile
from dsx.data.documents import (
    WHOLE,
    Stretch,
    count_lines,
    has_rows,
    is_cut_by_bytes,
    rows_of_groups,
)

PART_BYTES = 32 << 20  # of the sources: some seconds of encoding
_MOST_PARTS = 4096

Count = Callable[[Any, Any], tuple[int, int]]  # as workers.Task
CountAll = Callable[[Sequence[Count]], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Piece:
    """A file of a part, or a stretch of one."""

    file: CorpusFile
    stretch: Stretch = WHOLE


@dataclass(frozen=True)
class Part:
    """What one process encodes at a time; `num_bytes` of the sources are in it."""

    pieces: tuple[Piece, ...]
    num_bytes: int

    def name(self, recipe: str) -> str:
        """Return a hash of the sources and of how they are encoded, 32 characters."""
        hasher = blake2b(f"{recipe}\0".encode(), digest_size=16)
        for piece in self.pieces:
            file = piece.file
            facts = f"{file.path}\0{file.key}\0{file.size_bytes}\0{file.modified_ns}"
            text = f"{facts}\0{piece.stretch!r}\0"
            hasher.update(text.encode("utf-8", "surrogateescape"))
        return hasher.hexdigest()


def cut(corpus: Corpus, count_all: CountAll, part_bytes: int = PART_BYTES) -> list[Part]:
    """Return the parts in the corpus's order, each of about `part_bytes`, or more of a large one.

    `count_all` does the tasks that count lines and rows of large files, and returns their counts.
    """
    total = sum(file.size_bytes for file in corpus.files)
    size = max(part_bytes, -(-total // _MOST_PARTS))
    return [*_grouped(_pieces(corpus.files, size, count_all), size)]


def _pieces(
    files: Iterable[CorpusFile], size: int, count_all: CountAll
) -> Iterator[tuple[Piece, int]]:
    """Yield pieces and the bytes of each."""
    cuts = {file: _stretches(file, size) for file in files}
    by_bytes = [file for file, found in cuts.items() if len(found) > 1 and _in_bytes(file)]
    tasks = [partial(_count, file.path, stretch) for file in by_bytes for stretch in cuts[file]]
    counts = iter(count_all(tasks))
    for file in by_bytes:
        lines = rows = 0
        for index, stretch in enumerate(cuts[file]):
            cuts[file][index] = stretch._replace(rows=rows, lines=lines)
            more_lines, more_rows = next(counts)
            lines, rows = lines + more_lines, rows + more_rows
    for file, found in cuts.items():
        share, rest = divmod(file.size_bytes, len(found))
        for index, stretch in enumerate(found):
            yield Piece(file, stretch), share + (rest if index == 0 else 0)


def _count(path: Path, stretch: Stretch, _state: Any, _tell: Any) -> tuple[int, int]:
    return count_lines(path, stretch)


def _in_bytes(file: CorpusFile) -> bool:
    return is_cut_by_bytes(file.path)


def _stretches(file: CorpusFile, size: int) -> list[Stretch]:
    """Return a file cut in stretches of about `size` bytes, if it is larger and can be cut."""
    count = -(-file.size_bytes // size)
    if count < 2 or not has_rows(file.path):
        return [WHOLE]
    if _in_bytes(file):
        edges = [index * file.size_bytes // count for index in range(count)]
        return [Stretch(a, b) for a, b in zip(edges, [*edges[1:], None], strict=True)]
    groups = rows_of_groups(file.path)
    count = min(count, len(groups))
    if count < 2:
        return [WHOLE]
    edges = [index * len(groups) // count for index in range(count)]
    stops = [*edges[1:], None]
    return [Stretch(a, b, sum(groups[:a])) for a, b in zip(edges, stops, strict=True)]


def _grouped(pieces: Iterable[tuple[Piece, int]], size: int) -> Iterator[Part]:
    """Yield runs of pieces that are no larger than `size`, but for a single one."""
    held: list[Piece] = []
    held_bytes = 0
    for piece, num_bytes in pieces:
        if held and held_bytes + num_bytes > size:
            yield Part(tuple(held), held_bytes)
            held, held_bytes = [], 0
        held.append(piece)
        held_bytes += num_bytes
    if held:
        yield Part(tuple(held), held_bytes)
