"""One part of a corpus as tokens: what a process of a build does, and leaves in two files.

NAME.tokens has the tokens of the part's documents, end to end; NAME.npz how long each is, which
side of the split it is drawn for, and the counts. The .npz is written last, and whole: a part that
has one is finished.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from dsx.data.corpus import CorpusFile, read_text, score
from dsx.data.documents import has_rows, read_rows
from dsx.data.overlap import hash_of, smallest
from dsx.data.parts import Part, Piece
from dsx.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MAX_DOCUMENT_TOKENS = 2**31 - 1  # the .idx format stores lengths as int32
_DOCUMENTS_AT_A_TIME, _CHARACTERS_AT_A_TIME = 512, 4 << 20
Tell = Callable[[int, int], object]  # documents and tokens that were added


class Encoded(NamedTuple):
    """A finished part: of each document its length in tokens and its score, and what is counted.

    `hashes` are those of its documents that a sketch may need, of train and of validation alike.
    """

    lengths: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float64]
    hashes: npt.NDArray[np.uint64]
    num_not_text: int
    num_empty: int
    num_bad: int


@dataclass
class _Counts:
    lengths: array[int] = field(default_factory=lambda: array("i"))
    scores: array[float] = field(default_factory=lambda: array("d"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    num_not_text: int = 0
    num_empty: int = 0
    num_bad: int = 0

    def skip(self, error: ValueError) -> None:
        """Count a row that is bad; the first one of a part is said."""
        if not self.num_bad:
            logger.warning("%s: skipped (--skip-bad), as others that are bad will be", error)
        self.num_bad += 1


class Encoder(NamedTuple):
    """How parts are encoded, and where they go; rows that are bad are an error, or skipped."""

    folder: Path
    tokenizer: Tokenizer
    text_key: str
    dtype: np.dtype[np.integer]
    skips_bad: bool = False

    def encode(self, name: str, part: Part, tell: Tell) -> None:
        """Encode a part. ValueError for what cannot be read, or has changed meanwhile."""
        unfinished = self.folder / f"{name}.{os.getpid()}.tmp"
        counts = _Counts()
        try:
            with unfinished.open("wb") as file:
                for texts in _batches(_documents(part, self.text_key, self.skips_bad, counts)):
                    self._write(file, texts, counts, tell)
                _sync(file)
            for piece in part.pieces:
                _require_unchanged(piece.file)
            unfinished.replace(self.folder / f"{name}.tokens")
            with unfinished.open("wb") as file:
                _write_arrays(file, counts)
                _sync(file)
            unfinished.replace(self.folder / f"{name}.npz")
        finally:
            unfinished.unlink(missing_ok=True)

    def _write(self, file: BinaryIO, texts: list[str], counts: _Counts, tell: Tell) -> None:
        before = len(counts.lengths)
        num_tokens = 0
        for tokens in self.tokenizer.encode_all(texts):
            if tokens.size >= MAX_DOCUMENT_TOKENS:
                raise ValueError(
                    f"a document has {tokens.size + 1} tokens, and may have at most "
                    f"{MAX_DOCUMENT_TOKENS}; cut it in parts"
                )
            file.write(np.append(tokens, self.tokenizer.eod).astype(self.dtype).tobytes())
            counts.lengths.append(tokens.size + 1)
            num_tokens += tokens.size + 1
        tell(len(counts.lengths) - before, num_tokens)


def finished(folder: Path, name: str, dtype: np.dtype[np.integer]) -> Encoded | None:
    """Return a part that is finished; None for one that is not there, or not as its counts say."""
    path, tokens = folder / f"{name}.npz", folder / f"{name}.tokens"
    if not path.is_file() or not tokens.is_file():
        return None
    with np.load(path) as arrays:
        skipped = arrays["skipped"].tolist()
        if len(skipped) != 3:  # of a version that counted no bad rows
            return None
        found = Encoded(arrays["lengths"], arrays["scores"], arrays["hashes"], *skipped)
    num_tokens = int(found.lengths.sum(dtype=np.int64))
    return found if tokens.stat().st_size == num_tokens * dtype.itemsize else None


def _write_arrays(file: BinaryIO, counts: _Counts) -> None:
    np.savez(
        file,
        lengths=np.array(counts.lengths, np.int32),
        scores=np.array(counts.scores, np.float64),
        hashes=smallest(np.array(counts.hashes, np.uint64)),
        skipped=np.array([counts.num_not_text, counts.num_empty, counts.num_bad]),
    )


def _documents(part: Part, text_key: str, skips_bad: bool, counts: _Counts) -> Iterator[str]:
    """Yield a part's documents, and note their scores and hashes."""
    for piece in part.pieces:
        for row, text in enumerate(_texts_of(piece, text_key), start=piece.stretch.rows):
            if text is None:
                counts.num_not_text += 1
            elif not text:
                counts.num_empty += 1
            else:
                try:
                    document = _noted(text, row, piece, counts)
                except ValueError as error:
                    if not skips_bad:
                        raise
                    counts.skip(error)
                else:
                    yield document


def _noted(text: str | ValueError, row: int, piece: Piece, counts: _Counts) -> str:
    """Return a document whose score and hash have been noted; ValueError for a row that is bad."""
    if isinstance(text, ValueError):
        raise text
    file = piece.file
    try:
        found = hash_of(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"document {row + 1} of {file.path} is no text that UTF-8 can hold: {error.reason} at "
            f"character {error.start}; mend or remove it, or skip such rows (--skip-bad)"
        ) from None
    counts.hashes.append(found)
    counts.scores.append(score(f"{file.key}\0{row}" if has_rows(file.path) else file.key))
    return text


def _texts_of(piece: Piece, text_key: str) -> Iterator[str | ValueError | None]:
    """Yield the documents of a piece; None for a file that is no text, an error for a bad row."""
    file = piece.file
    if has_rows(file.path):
        yield from read_rows(file.path, text_key, piece.stretch)
        return
    if file.size_bytes >= MAX_DOCUMENT_TOKENS:
        raise ValueError(
            f"{file.key!r} has {file.size_bytes} bytes, a document may have at most "
            f"{MAX_DOCUMENT_TOKENS - 1}; cut the file in parts"
        )
    yield read_text(file.path)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield documents some at a time: few, where they are long."""
    held: list[str] = []
    characters = 0
    for text in texts:
        held.append(text)
        characters += len(text)
        if len(held) == _DOCUMENTS_AT_A_TIME or characters >= _CHARACTERS_AT_A_TIME:
            yield held
            held, characters = [], 0
    if held:
        yield held


def _require_unchanged(file: CorpusFile) -> None:
    stat = file.path.stat()
    if (stat.st_size, stat.st_mtime_ns) != (file.size_bytes, file.modified_ns):
        raise ValueError(f"{file.path} changed during the build; run the build again")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
