"""dataset.json: what a dataset directory holds, without an absolute path."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

FORMAT = "dsx-dataset"
FORMAT_VERSION = 2
_READ = (1, FORMAT_VERSION)  # the first had no sketch
MANIFEST = "dataset.json"

SPLITS = ("train", "validation")


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
    num_bad: int = 0  # rows, with skip_bad


@dataclass(frozen=True)
class BuildSummary:
    """What a dataset directory holds; all but `path` and `status` is stored in dataset.json.

    `unigram_entropy` is the entropy of the train split's token frequencies in nats per token: the
    loss of a model that knows the frequencies and nothing else. `sketch` is that of the documents
    of both splits (overlap.py), empty where an earlier version has written it.
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
    sketch: tuple[str, ...] = ()


def read_summary(directory: str | os.PathLike[str]) -> BuildSummary:
    """Read dataset.json. Raises ValueError if `directory` is not a dataset of this version."""
    fields = read_manifest(Path(directory))
    if fields is None:
        raise ValueError(
            f"{os.fspath(directory)!r} is not a dsx dataset ({MANIFEST} is missing or not ours); "
            "create one with: dsx data build --from stdlib --out DIR"
        )
    version = fields.pop("format_version", None)
    if version not in _READ:
        raise ValueError(
            f"{os.fspath(directory)!r} has format version {version}, this dsx reads "
            f"{FORMAT_VERSION}; rebuild it with: dsx data build --force"
        )
    del fields["format"]
    for split in SPLITS:
        fields[split] = SplitSummary(**fields[split])
    fields["skipped"] = SkippedFiles(**fields["skipped"])
    fields["sources"] = tuple(fields["sources"])
    fields["sketch"] = tuple(fields.get("sketch", ()))
    return BuildSummary(path=os.fspath(directory), status="up to date", **fields)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return dataset.json as a dict, or None unless dsx wrote it."""
    try:
        fields = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(fields, dict) or "format" not in fields or fields["format"] != FORMAT:
        return None
    return cast("dict[str, Any]", fields)


def write_manifest(directory: Path, summary: BuildSummary) -> None:
    """Write dataset.json into a directory that is otherwise complete."""
    fields = asdict(summary)
    del fields["path"], fields["status"]
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, **fields}
    text = json.dumps(manifest, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")
