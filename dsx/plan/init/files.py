"""The files that `dsx init` writes: none over another without --force."""

from __future__ import annotations

import json
from pathlib import Path

from dsx.config.files import require_place
from dsx.plan.init.config import Choice, Inner, as_flags, as_json, notes

_JSON, _FLAGS = ".json", ".flags"


def require_new(file: Path, is_forced: bool) -> None:
    """Raise ValueError for another ending, no folder, or a file that is there."""
    if file.suffix not in (_JSON, _FLAGS):
        raise ValueError(
            f"{file}: give a name that ends in {_JSON}, for DeepSpeed, or in {_FLAGS}, for Megatron"
        )
    for path in _files(file):
        require_place("FILE", path)
        if path.exists() and not is_forced:
            raise ValueError(f"{path} exists: give another name, or --force to write over it")


def write(file: Path, choice: Choice, inner: Inner) -> list[str]:
    """Write the configuration, and return what is said of it."""
    if file.suffix == _FLAGS:
        file.write_text(as_flags(choice))
    else:
        document = as_json(choice, inner)
        file.write_text(json.dumps(document, indent=2) + "\n")
        file.with_suffix(".md").write_text(notes(choice, document, str(file)))
    written = " and ".join(map(str, _files(file)))
    look = f"dsx doctor {file}"
    return [*choice.read.facts, *choice.words, f"wrote {written}; next: {look}"]


def _files(file: Path) -> list[Path]:
    return [file] if file.suffix == _FLAGS else [file, file.with_suffix(".md")]
