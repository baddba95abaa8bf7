"""Build a dataset directory in Megatron's indexed format.

    DIR/train.bin, train.idx, validation.bin, validation.idx, dataset.json

A text file is one document and so is every row of the others; the tokens, uint16 or with large
vocabularies int32, end with the end-of-document id. dataset.json says what is inside without naming
an absolute path. Its `sources_digest` (names, sizes, times) tells whether the dataset is up to
date; its `content_digest` (blake2b-128 of train.bin followed by validation.bin) whether two sites
train on the same data, and its `sketch` how many documents two datasets have in common.

The sources are cut into parts (parts.py), which processes encode side by side (encode.py); splits
(splits.py) are put together from them. No bit depends on how many processes there are, or on how
often the build was killed and started again.

Invariants: DIR is either absent or complete, since it is built in a sibling (unfinished.py) and
renamed; a directory that dsx did not build is never touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsx.data.corpus import Corpus, find_corpus, require_fraction
from dsx.data.documents import TEXT_KEY
from dsx.data.encode import Encoder, Tell, finished
from dsx.data.indexed import dtype_for
from dsx.data.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    BuildSummary,
    SkippedFiles,
    read_manifest,
    read_summary,
    write_manifest,
)
from dsx.data.parts import PART_BYTES, Count, Part, cut
from dsx.data.splits import write_splits
from dsx.data.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer
from dsx.data.unfinished import Unfinished
from dsx.data.workers import Sums, Task, run_all

logger = logging.getLogger(__name__)
_DATA_FILES = tuple(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx"))
# Megatron keeps its sample indices in DIR/<split>/cache: they describe the old tokens and go too.
_OWN_ENTRIES = frozenset({MANIFEST, *_DATA_FILES, *SPLITS})


class Progress(NamedTuple):
    """How far a build has come: bytes of the sources in finished parts, and what is encoded.

    `num_kept` bytes were finished by an earlier build, and are counted in `num_done`. Once all are
    encoded, `num_written` of the tokens are in the dataset.
    """

    num_bytes: int
    num_done: int
    num_kept: int
    num_documents: int
    num_tokens: int
    num_written: int


def build(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    validation_fraction: float = 0.05,
    force: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    text_key: str = TEXT_KEY,
    skip_bad: bool = False,
    workers: int = 1,
    progress: Callable[[Progress], object] = lambda progress: None,
    part_bytes: int = PART_BYTES,
) -> BuildSummary:
    """Build the dataset `out` from `sources`, or return at once if it is up to date.

    `tokenizer` is a Hugging Face folder, without which tokens are bytes; `text_key` the column of
    sources with rows. A row that is bad (no JSON, or no text there) is an error, and with
    `skip_bad` left out and counted. With `workers` processes the result is the same, to the bit; a
    script that asks for several has to be one that can be imported (`if __name__ == "__main__":`).
    A build that was killed goes on where it was. `progress` is told some times a second;
    `part_bytes` of the sources are encoded at a time by each process, and lost by a kill.

    A dsx dataset whose sources changed is replaced. Raises ValueError for sources that cannot be
    split and for an `out` that is not a dsx dataset.
    """
    if workers < 1 or part_bytes < 1:
        raise ValueError(f"workers={workers} and part_bytes={part_bytes} must be at least 1")
    target = Path(out).expanduser().resolve()
    had_dataset = _check_replaceable(target)
    corpus = find_corpus(sources)
    _check_outside(target, corpus)
    require_fraction(validation_fraction)
    chosen = _tokenizer(tokenizer)
    recipe = f"{FORMAT_VERSION}\0{chosen.name}\0{chosen.eod}\0{text_key}"
    recipe += "\0skip_bad" if skip_bad else ""
    whole = f"{recipe}\0{validation_fraction!r}\0{corpus.digest()}"
    digest = blake2b(whole.encode(), digest_size=16).hexdigest()
    unfinished = Unfinished(target)
    if had_dataset and not force:
        summary = _up_to_date(target, digest)
        if summary is not None:
            unfinished.tidy()
            return replace(summary, path=os.fspath(out))
    with unfinished.held():
        try:
            encoded = _Parts(corpus, recipe, unfinished, workers, progress, part_bytes)
            encoded.encode(chosen, tokenizer, text_key, skip_bad)
            summary = _put_together(encoded, chosen, corpus, validation_fraction, digest)
        except BaseException:
            if not unfinished.has_parts():
                unfinished.remove()
            else:
                logger.warning(
                    "what is finished is kept in %s: the same build goes on there",
                    unfinished.folder,
                )
            raise
        unfinished.publish()
    return replace(summary, path=os.fspath(out), status="rebuilt" if had_dataset else "built")


def _tokenizer(folder: str | os.PathLike[str] | None) -> Tokenizer:
    return ByteTokenizer() if folder is None else FolderTokenizer(Path(folder).expanduser())


class _Parts:
    """The parts of a corpus, and what of them is finished."""

    def __init__(
        self,
        corpus: Corpus,
        recipe: str,
        unfinished: Unfinished,
        workers: int,
        progress: Callable[[Progress], object],
        part_bytes: int,
    ) -> None:
        self.unfinished = unfinished
        self._workers = workers
        self._progress = progress
        self._parts = {part.name(recipe): part for part in cut(corpus, self._count, part_bytes)}
        self._sums = Sums()
        self._num_bytes = sum(part.num_bytes for part in self._parts.values())
        self._num_done = self._num_kept = self._num_written = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def _count(self, tasks: Sequence[Count]) -> Sequence[tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        run_all(tasks, _nothing, self._workers, Sums(), found.__setitem__, _nothing)
        return [found[index] for index in range(len(tasks))]

    def encode(
        self, tokenizer: Tokenizer, folder: str | os.PathLike[str] | None, text_key: str,
        skip_bad: bool,
    ) -> None:  # fmt: skip
        """Encode what is not finished."""
        dtype = dtype_for(tokenizer.vocab_size)
        self.unfinished.keep_parts(self._parts)
        missing: list[tuple[str, Part]] = []
        for name, part in self._parts.items():
            kept = finished(self.unfinished.parts, name, dtype)
            if kept is None:
                missing.append((name, part))
            else:
                self._num_kept += part.num_bytes
                self._sums.add(len(kept.lengths), int(kept.lengths.sum(dtype=np.int64)))
        self._num_done = self._num_kept
        tasks: list[Task] = [partial(_encode, name, part) for name, part in missing]
        setup = partial(
            _encoder, self.unfinished.parts, folder, text_key, skip_bad, self._workers > 1
        )
        self.tick()
        run_all(
            tasks, setup, self._workers, self._sums,
            lambda index, _: self._take(missing[index][1]), self.tick,
        )  # fmt: skip

    def _take(self, part: Part) -> None:
        self._num_done += part.num_bytes

    def tick(self) -> None:
        """Tell how far it has come."""
        counts = self._sums.read()
        done = self._num_bytes, self._num_done, self._num_kept
        self._progress(Progress(*done, *counts, self._num_written))

    def take_written(self, num_tokens: int) -> None:
        """Count what has been put together."""
        self._num_written += num_tokens
        self.tick()


def _nothing(*_: object) -> None:
    pass


def _encoder(
    folder: Path, tokenizer: str | os.PathLike[str] | None, text_key: str, skip_bad: bool,
    is_one_of_many: bool,
) -> Encoder:  # fmt: skip
    if is_one_of_many:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the others have the cores
    found = _tokenizer(tokenizer)
    return Encoder(folder, found, text_key, dtype_for(found.vocab_size), skip_bad)


def _encode(name: str, part: Part, encoder: Encoder, tell: Tell) -> None:
    encoder.encode(name, part, tell)


def _put_together(
    parts: _Parts, tokenizer: Tokenizer, corpus: Corpus, validation_fraction: float, digest: str
) -> BuildSummary:
    """Write all five files, dataset.json last."""
    dtype = dtype_for(tokenizer.vocab_size)
    place, unfinished = parts.unfinished.parts, parts.unfinished
    encoded = [(place / f"{name}.tokens", finished(place, name, dtype)) for name in parts]
    known = [(path, part) for path, part in encoded if part is not None]
    if len(known) < len(encoded):
        raise OSError(f"files in {place} have vanished during the build; run the build again")
    unfinished.dataset.mkdir()
    try:
        written = write_splits(
            unfinished.dataset, known, validation_fraction, dtype, tokenizer.vocab_size,
            parts.take_written,
        )  # fmt: skip
    except ValueError:  # too few documents: nothing of it is of use
        unfinished.remove()
        raise
    summary = BuildSummary(
        path="",
        status="built",
        sources=corpus.sources,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        dtype=dtype.name,
        validation_fraction=validation_fraction,
        train=written.train,
        validation=written.validation,
        unigram_entropy=written.unigram_entropy,
        skipped=SkippedFiles(
            corpus.num_hidden,
            corpus.num_duplicates,
            sum(part.num_not_text for _, part in known),
            sum(part.num_empty for _, part in known),
            sum(part.num_bad for _, part in known),
        ),
        sources_digest=digest,
        content_digest=written.content_digest,
        sketch=written.sketch,
    )
    write_manifest(unfinished.dataset, summary)
    return summary


def _check_replaceable(target: Path) -> bool:
    """Return whether `target` is a dsx dataset; raise ValueError if it is anything but absent."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    if read_manifest(target) is None:
        raise ValueError(
            f"out={str(target)!r} exists and is not a dsx dataset; allowed are a new path, an "
            "empty directory or a dataset built by dsx; choose another --out"
        )
    foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in _OWN_ENTRIES)
    if foreign:
        raise ValueError(
            f"out={str(target)!r} holds {foreign[0]!r}, which dsx did not write and would delete; "
            "move it away or choose another --out"
        )
    return True


def _check_outside(target: Path, corpus: Corpus) -> None:
    """Raise ValueError if the dataset would become part of its own sources."""
    for root in corpus.roots:
        if target == root or root in target.parents:
            raise ValueError(
                f"out={str(target)!r} lies inside the source {root.name!r} and would be read as "
                "text by the next build; choose an --out outside of it"
            )


def _up_to_date(target: Path, digest: str) -> BuildSummary | None:
    """Return the summary of a complete dataset made from the same sources, else None."""
    fields = read_manifest(target)
    if fields is None or fields.get("format_version") != FORMAT_VERSION:
        return None
    summary = read_summary(target)
    itemsize = np.dtype(summary.dtype).itemsize
    sizes = {f"{split}.bin": getattr(summary, split).num_tokens * itemsize for split in SPLITS}
    is_complete = all((target / name).is_file() for name in _DATA_FILES) and all(
        (target / name).stat().st_size == size for name, size in sizes.items()
    )
    return summary if is_complete and summary.sources_digest == digest else None
