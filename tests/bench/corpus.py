"""A corpus that is built in no time."""

from __future__ import annotations

from pathlib import Path

from dsx.data import build


def build_corpus(folder: Path) -> Path:
    """Return the dataset of forty small texts in `folder`."""
    texts = folder / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"text {i}: the quick brown fox {i * i} jumps\n" * 40)
    build([texts], folder / "data")
    return folder / "data"
