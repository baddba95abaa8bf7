"""Build a dataset directory in Megatron's indexed format.

    DIR/train.bin, train.idx, validation.bin, validation.idx, dataset.json

The .bin/.idx files come from megatron-core's own IndexedDatasetBuilder: a text file is one document
and so is every row of the others; the tokens, uint16 or with large vocabularies int32, end with the
end-of-document id. dataset.json says what is
inside without naming an absolute path. Its `sources_digest` (names, sizes, times) tells whether the
dataset is up to date; its `content_digest` (blake2b-128 of train.bin followed by validation.bin)
tells whether two sites train on the same data.

Invariants: DIR is either absent or complete, since it is built in a temporary sibling and renamed;
a directory that dsx did not build is never touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dsx.data.corpus import Corpus, find_corpus, require_fraction
from dsx.data.documents import TEXT_KEY
from dsx.data.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    BuildSummary,
    read_manifest,
    read_summary,
    write_manifest,
)
from dsx.data.splits import Progress, find_documents, import_indexed_dataset, write_splits
from dsx.data.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer

_DATA_FILES = tuple(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx"))
# Megatron keeps its sample indices in DIR/<split>/cache: they describe the old tokens and go too.
_OWN_ENTRIES = frozenset({MANIFEST, *_DATA_FILES, *SPLITS})


def build(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    validation_fraction: float = 0.05,
    force: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    text_key: str = TEXT_KEY,
    progress: Progress = lambda done, of: None,
) -> BuildSummary:
    """Build the dataset `out` from `sources`, or return at once if it is up to date.

    `tokenizer` is a Hugging Face folder, without which tokens are bytes; `text_key` the column of
    sources with rows. `progress` is told how many documents are written, of how many. A dsx dataset whose sources changed is replaced. Raises ValueError for sources that cannot be
    split and for an `out` that is not a dsx dataset, ModuleNotFoundError without megatron-core.
    """
    target = Path(out).expanduser().resolve()
    had_dataset = _check_replaceable(target)
    corpus = find_corpus(sources)
    _check_outside(target, corpus)
    require_fraction(validation_fraction)
    chosen = ByteTokenizer() if tokenizer is None else FolderTokenizer(Path(tokenizer).expanduser())
    digest = _sources_digest(corpus, chosen, text_key, validation_fraction)
    if had_dataset and not force:
        summary = _up_to_date(target, digest)
        if summary is not None:
            return replace(summary, path=os.fspath(out))
    summary = _build_new(
        target, corpus, chosen, text_key, validation_fraction, digest, progress
    )
    return replace(summary, path=os.fspath(out), status="rebuilt" if had_dataset else "built")


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


def _sources_digest(
    corpus: Corpus, tokenizer: Tokenizer, text_key: str, validation_fraction: float
) -> str:
    recipe = f"{FORMAT_VERSION}\0{tokenizer.name}\0{validation_fraction!r}\0{corpus.digest()}"
    if text_key != TEXT_KEY:
        recipe += f"\0{text_key}"
    return blake2b(recipe.encode(), digest_size=16).hexdigest()


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


def _build_new(
    target: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    text_key: str,
    validation_fraction: float,
    digest: str,
    progress: Progress,
) -> BuildSummary:
    """Write all five files into a sibling of `target`, dataset.json last, then rename it."""
    found = find_documents(corpus, text_key, validation_fraction)
    indexed_dataset = import_indexed_dataset()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        written = write_splits(partial, found, tokenizer, indexed_dataset, progress)
        summary = BuildSummary(
            path=str(target),
            status="built",
            sources=corpus.sources,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            dtype=written.dtype,
            validation_fraction=validation_fraction,
            train=written.train,
            validation=written.validation,
            unigram_entropy=written.unigram_entropy,
            skipped=found.skipped,
            sources_digest=digest,
            content_digest=written.content_digest,
        )
        write_manifest(partial, summary)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def _publish(partial: Path, target: Path) -> None:
    """Rename the finished directory to `target`; a dataset that is there is moved aside first."""
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)
