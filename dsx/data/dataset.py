"""Build a dataset directory in Megatron's indexed format.

    DIR/train.bin, train.idx, validation.bin, validation.idx, dataset.json

The .bin/.idx files come from megatron-core's own IndexedDatasetBuilder: one file of the corpus is
one document, its tokens are uint16 and end with the end-of-document id. dataset.json says what is
inside without naming an absolute path. Its `sources_digest` (names, sizes, times) tells whether the
dataset is up to date; its `content_digest` (blake2b-128 of train.bin followed by validation.bin)
tells whether two sites train on the same data.

Invariants: DIR is either absent or complete, since it is built in a temporary sibling and renamed;
a directory that dsx did not build is never touched.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dsx.data.corpus import Corpus, CorpusFile, find_corpus, read_text, split_files
from dsx.data.tokenizer import ByteTokenizer

FORMAT = "dsx-dataset"
FORMAT_VERSION = 1
MANIFEST = "dataset.json"

_SPLITS = ("train", "validation")
_DATA_FILES = tuple(f"{split}.{suffix}" for split in _SPLITS for suffix in ("bin", "idx"))
# Megatron keeps its sample indices in DIR/<split>/cache: they describe the old tokens and go too.
_OWN_ENTRIES = frozenset({MANIFEST, *_DATA_FILES, *_SPLITS})
_MAX_DOCUMENT_TOKENS = 2**31 - 1  # the .idx format stores lengths as int32


@dataclass(frozen=True)
class SplitSummary:
    """How much one split holds; the end-of-document ids are counted as tokens."""

    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class SkippedFiles:
    """How many entries of the sources did not become documents, and why."""

    num_hidden: int
    num_duplicates: int
    num_not_text: int
    num_empty: int


@dataclass(frozen=True)
class BuildSummary:
    """What a dataset directory holds; all but `path` and `status` is stored in dataset.json.

    `unigram_entropy` is the entropy of the train split's token frequencies in nats per token: the
    loss of a model that knows the frequencies and nothing else.
    """

    path: str
    status: Literal["built", "rebuilt", "up to date"]
    sources: tuple[str, ...]
    tokenizer: str
    vocab_size: int
    eod: int
    dtype: str
    validation_fraction: float
    train: SplitSummary
    validation: SplitSummary
    unigram_entropy: float
    skipped: SkippedFiles
    sources_digest: str
    content_digest: str


def build(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    validation_fraction: float = 0.05,
    force: bool = False,
) -> BuildSummary:
    """Build the dataset `out` from `sources`, or return at once if it is up to date.

    A dsx dataset whose sources changed is replaced. Raises ValueError for sources that cannot be
    split and for an `out` that is not a dsx dataset, ModuleNotFoundError without megatron-core.
    """
    target = Path(out).expanduser().resolve()
    had_dataset = _check_replaceable(target)
    corpus = find_corpus(sources)
    _check_outside(target, corpus)
    tokenizer = ByteTokenizer()
    digest = _sources_digest(corpus, tokenizer, validation_fraction)
    if had_dataset and not force:
        summary = _up_to_date(target, digest)
        if summary is not None:
            return replace(summary, path=os.fspath(out))
    summary = _build_new(target, corpus, tokenizer, validation_fraction, digest)
    return replace(summary, path=os.fspath(out), status="rebuilt" if had_dataset else "built")


def read_summary(directory: str | os.PathLike[str]) -> BuildSummary:
    """Read dataset.json. Raises ValueError if `directory` is not a dataset of this version."""
    fields = _read_manifest(Path(directory))
    if fields is None:
        raise ValueError(
            f"{os.fspath(directory)!r} is not a dsx dataset ({MANIFEST} is missing or not ours); "
            "create one with: dsx data build --from stdlib --out DIR"
        )
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{os.fspath(directory)!r} has format version {version}, this dsx reads "
            f"{FORMAT_VERSION}; rebuild it with: dsx data build --force"
        )
    del fields["format"]
    for split in _SPLITS:
        fields[split] = SplitSummary(**fields[split])
    fields["skipped"] = SkippedFiles(**fields["skipped"])
    fields["sources"] = tuple(fields["sources"])
    return BuildSummary(path=os.fspath(directory), status="up to date", **fields)


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return dataset.json as a dict, or None unless dsx wrote it."""
    try:
        fields = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(fields, dict) or "format" not in fields or fields["format"] != FORMAT:
        return None
    return cast("dict[str, Any]", fields)


def _check_replaceable(target: Path) -> bool:
    """Return whether `target` is a dsx dataset; raise ValueError if it is anything but absent."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    if _read_manifest(target) is None:
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


def _sources_digest(corpus: Corpus, tokenizer: ByteTokenizer, validation_fraction: float) -> str:
    recipe = f"{FORMAT_VERSION}\0{tokenizer.name}\0{validation_fraction!r}\0{corpus.digest()}"
    return blake2b(recipe.encode(), digest_size=16).hexdigest()


def _up_to_date(target: Path, digest: str) -> BuildSummary | None:
    """Return the summary of a complete dataset made from the same sources, else None."""
    fields = _read_manifest(target)
    if fields is None or fields.get("format_version") != FORMAT_VERSION:
        return None
    summary = read_summary(target)
    itemsize = np.dtype(summary.dtype).itemsize
    sizes = {f"{split}.bin": getattr(summary, split).num_tokens * itemsize for split in _SPLITS}
    is_complete = all((target / name).is_file() for name in _DATA_FILES) and all(
        (target / name).stat().st_size == size for name, size in sizes.items()
    )
    return summary if is_complete and summary.sources_digest == digest else None


def _build_new(
    target: Path,
    corpus: Corpus,
    tokenizer: ByteTokenizer,
    validation_fraction: float,
    digest: str,
) -> BuildSummary:
    """Write all five files into a sibling of `target`, dataset.json last, then rename it."""
    texts, skipped = _keep_texts(corpus)
    parts = split_files(texts, validation_fraction)
    indexed_dataset = _import_indexed_dataset()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        written = _write_splits(partial, parts, tokenizer, indexed_dataset)
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
            skipped=skipped,
            sources_digest=digest,
            content_digest=written.content_digest,
        )
        _write_manifest(partial, summary)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def _keep_texts(corpus: Corpus) -> tuple[list[CorpusFile], SkippedFiles]:
    """Return the files that become documents, and how many others there are.

    Reads every file once before the split, so that no split is empty for want of text.
    """
    kept: list[CorpusFile] = []
    num_not_text = num_empty = 0
    for file in corpus.files:
        if file.size_bytes >= _MAX_DOCUMENT_TOKENS:
            raise ValueError(
                f"{file.key!r} has {file.size_bytes} bytes, a document may have at most "
                f"{_MAX_DOCUMENT_TOKENS - 1}; cut the file in parts"
            )
        text = read_text(file.path)
        num_not_text += text is None
        num_empty += text == ""
        if text:
            kept.append(file)
    return kept, SkippedFiles(corpus.num_hidden, corpus.num_duplicates, num_not_text, num_empty)


class _Written(NamedTuple):
    dtype: str
    train: SplitSummary
    validation: SplitSummary
    unigram_entropy: float
    content_digest: str


def _write_splits(
    directory: Path,
    parts: tuple[list[CorpusFile], list[CorpusFile]],
    tokenizer: ByteTokenizer,
    indexed_dataset: ModuleType,
) -> _Written:
    """Write the .bin and .idx files of (train, validation) into `directory`."""
    dtype: type[np.integer] = indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size)
    hasher = blake2b(digest_size=16)
    counts: list[npt.NDArray[np.int64]] = []
    for split, files in zip(_SPLITS, parts, strict=True):
        builder = indexed_dataset.IndexedDatasetBuilder(str(directory / f"{split}.bin"), dtype)
        counts.append(_write_split(builder, files, tokenizer, hasher))
        builder.finalize(str(directory / f"{split}.idx"))
    train, validation = (
        SplitSummary(len(files), int(count.sum()))
        for files, count in zip(parts, counts, strict=True)
    )
    return _Written(dtype.__name__, train, validation, _entropy(counts[0]), hasher.hexdigest())


def _write_split(
    builder: Any, files: Sequence[CorpusFile], tokenizer: ByteTokenizer, hasher: blake2b
) -> npt.NDArray[np.int64]:
    """Add each file as one document, update `hasher` in place, return token counts [vocab_size]."""
    eod = np.array([tokenizer.eod], dtype=np.uint16)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for file in files:
        text = read_text(file.path)
        if not text:
            raise ValueError(f"{file.key!r} changed during the build; run the build again")
        tokens = np.concatenate([tokenizer.encode(text), eod])
        counts += np.bincount(tokens, minlength=tokenizer.vocab_size)
        hasher.update(tokens.astype("<u2", copy=False).tobytes())
        builder.add_document(tokens, [tokens.size])
    return counts


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy of the frequencies in nats."""
    frequencies = counts[counts > 0] / counts.sum()
    return -math.fsum(frequencies * np.log(frequencies))


def _write_manifest(directory: Path, summary: BuildSummary) -> None:
    fields = asdict(summary)
    del fields["path"], fields["status"]
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, **fields}
    text = json.dumps(manifest, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def _publish(partial: Path, target: Path) -> None:
    """Rename the finished directory to `target`; a dataset that is there is moved aside first."""
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)


def _import_indexed_dataset() -> ModuleType:
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
