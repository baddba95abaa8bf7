"""The parts of a corpus put together: two files of tokens, their indices, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dsx.data.corpus import held_out
from dsx.data.encode import Encoded
from dsx.data.indexed import write_index
from dsx.data.manifest import SPLITS, SplitSummary
from dsx.data.overlap import sketch_of

_BYTES_AT_A_TIME = 1 << 24


class Written(NamedTuple):
    """What two splits hold, and a hash of their .bin files, one behind the other."""

    train: SplitSummary
    validation: SplitSummary
    unigram_entropy: float
    content_digest: str
    sketch: tuple[str, ...]


def write_splits(
    directory: Path,
    parts: Sequence[tuple[Path, Encoded]],
    validation_fraction: float,
    dtype: np.dtype[np.integer],
    vocab_size: int,
    tell: Callable[[int], object],
) -> Written:
    """Write the .bin and .idx files of both splits into `directory`, of finished parts in order.

    `tell` hears how many tokens were added. ValueError for too few documents.
    """
    lengths = np.concatenate([part.lengths for _, part in parts] or [np.empty(0, np.int32)])
    scores = np.concatenate([part.scores for _, part in parts] or [np.empty(0)])
    is_held_out = held_out(scores, validation_fraction)
    counts = np.zeros((len(SPLITS), vocab_size), dtype=np.int64)
    paths = [directory / f"{split}.bin" for split in SPLITS]
    with paths[0].open("wb") as train, paths[1].open("wb") as validation:
        first = 0
        for path, part in parts:
            tokens = np.fromfile(path, dtype)
            held = np.repeat(is_held_out[first : first + len(part.lengths)], part.lengths)
            first += len(part.lengths)
            for side, file in enumerate((train, validation)):
                chosen = tokens[held == bool(side)]
                counts[side] += np.bincount(chosen, minlength=vocab_size)
                file.write(chosen.tobytes())
            tell(tokens.size)
    summaries: list[SplitSummary] = []
    for side, path in enumerate(paths):
        own = lengths[is_held_out == bool(side)]
        write_index(path.with_suffix(".idx"), own, dtype)
        summaries.append(SplitSummary(len(own), int(counts[side].sum())))
    sketch = sketch_of([part.hashes for _, part in parts])
    train_summary, validation_summary = summaries
    return Written(train_summary, validation_summary, _entropy(counts[0]), digest_of(paths), sketch)


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy of the frequencies in nats."""
    frequencies = counts[counts > 0] / counts.sum()
    return -math.fsum(frequencies * np.log(frequencies))


def digest_of(paths: Sequence[Path]) -> str:
    """Return a hash of files, one behind the other."""
    hasher = blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_BYTES_AT_A_TIME):
                hasher.update(piece)
    return hasher.hexdigest()
