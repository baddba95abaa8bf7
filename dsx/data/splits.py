"""The documents of a corpus, which of them are held out, and the two files they are written to.

The sources are read twice: to see which documents there are, so that the split is exact and its
counts are known before, and to write them. They are encoded some at a time, which a Hugging Face
tokenizer does on all cores.
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dsx.data.corpus import Corpus, CorpusFile, held_out, read_text, score
from dsx.data.documents import has_rows, read_rows
from dsx.data.manifest import SPLITS, SkippedFiles, SplitSummary
from dsx.data.tokenizer import Tokenizer

Progress = Callable[[int, int], object]
_MAX_DOCUMENT_TOKENS = 2**31 - 1  # the .idx format stores lengths as int32
_DOCUMENTS_AT_A_TIME = 512
_BYTES_AT_A_TIME = 1 << 24


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus in order, read anew each time, and whether each is held out."""

    corpus: Corpus
    text_key: str
    is_held_out: npt.NDArray[np.bool_]
    skipped: SkippedFiles

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.is_held_out)

    def texts(self) -> Iterator[tuple[bool, str]]:
        """Yield whether a document is held out, and its text; ValueError if files have changed."""
        held = iter(self.is_held_out.tolist())
        changed = ValueError("the sources changed during the build; run the build again")
        for file in self.corpus.files:
            for text in _texts_of(file, self.text_key):
                if text:
                    side = next(held, None)
                    if side is None:
                        raise changed
                    yield side, text
        if next(held, None) is not None:
            raise changed


class Written(NamedTuple):
    """What two splits hold, and a hash of their .bin files, one behind the other."""

    dtype: str
    train: SplitSummary
    validation: SplitSummary
    unigram_entropy: float
    content_digest: str


def find_documents(corpus: Corpus, text_key: str, validation_fraction: float) -> Documents:
    """Return a corpus's documents, all of which are read once; ValueError for too few."""
    scores = array("d")
    num_not_text = num_empty = 0
    for file in corpus.files:
        of_rows = has_rows(file.path)
        for row, text in enumerate(_texts_of(file, text_key)):
            num_not_text += text is None
            num_empty += text == ""
            if text:
                scores.append(score(f"{file.key}\0{row}" if of_rows else file.key))
    skipped = SkippedFiles(corpus.num_hidden, corpus.num_duplicates, num_not_text, num_empty)
    is_held_out = held_out(np.asarray(scores, dtype=np.float64), validation_fraction)
    return Documents(corpus, text_key, is_held_out, skipped)


def write_splits(
    directory: Path,
    documents: Documents,
    tokenizer: Tokenizer,
    indexed_dataset: ModuleType,
    progress: Progress,
) -> Written:
    """Write the .bin and .idx files of both splits into `directory`."""
    dtype: type[np.integer] = indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size)
    paths = [directory / f"{split}.bin" for split in SPLITS]
    builders = [indexed_dataset.IndexedDatasetBuilder(str(path), dtype) for path in paths]
    counts = np.zeros((len(SPLITS), tokenizer.vocab_size), dtype=np.int64)
    done, eod = 0, np.array([tokenizer.eod])
    for part in _in_parts(documents.texts()):
        for (side, _), encoded in zip(
            part, tokenizer.encode_all([text for _, text in part]), strict=True
        ):
            tokens = np.concatenate([encoded, eod]).astype(dtype)
            if tokens.size > _MAX_DOCUMENT_TOKENS:
                raise ValueError(
                    f"a document has {tokens.size} tokens, and may have at most "
                    f"{_MAX_DOCUMENT_TOKENS}; cut it in parts"
                )
            counts[int(side)] += np.bincount(tokens, minlength=tokenizer.vocab_size)
            builders[int(side)].add_document(tokens, [tokens.size])
        done += len(part)
        progress(done, len(documents))
    for builder, path in zip(builders, paths, strict=True):
        builder.finalize(str(path.with_suffix(".idx")))
    held = int(documents.is_held_out.sum())
    train, validation = (
        SplitSummary(number, int(count.sum()))
        for number, count in zip((len(documents) - held, held), counts, strict=True)
    )
    return Written(dtype.__name__, train, validation, _entropy(counts[0]), _digest(paths))


def _texts_of(file: CorpusFile, text_key: str) -> Iterator[str | None]:
    """Yield the documents of a file; None for a file that is no text."""
    if has_rows(file.path):
        yield from read_rows(file.path, text_key)
        return
    if file.size_bytes >= _MAX_DOCUMENT_TOKENS:
        raise ValueError(
            f"{file.key!r} has {file.size_bytes} bytes, a document may have at most "
            f"{_MAX_DOCUMENT_TOKENS - 1}; cut the file in parts"
        )
    yield read_text(file.path)


def _in_parts(texts: Iterator[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    while part := list(islice(texts, _DOCUMENTS_AT_A_TIME)):
        yield part


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy of the frequencies in nats."""
    frequencies = counts[counts > 0] / counts.sum()
    return -math.fsum(frequencies * np.log(frequencies))


def _digest(paths: list[Path]) -> str:
    """Return a hash of files, one behind the other."""
    hasher = blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_BYTES_AT_A_TIME):
                hasher.update(piece)
    return hasher.hexdigest()


def import_indexed_dataset() -> ModuleType:
    """Import megatron-core's module without its warnings about kernels that data does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r".*(Transformer Engine|Apex).* (is|are) not installed", UserWarning
        )
        try:
            return import_module("megatron.core.datasets.indexed_dataset")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("megatron"):
                raise
            raise ModuleNotFoundError(
                "building a dataset needs megatron-core; install it with: "
                'pip install "dsx-train[megatron]"',
                name=error.name,
            ) from error
