"""Which data Megatron-LM's arguments name: by split, with a digest of its content and its size.

Nothing of a dataset is read but the ends of its files: of the index and of the tokens the length,
the first and the last megabyte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dsx.data.identity import build_of
from dsx.data.windows import open_tokens
from dsx.training.data_sources import Source

_END = 1 << 20  # bytes


def sources_of_arguments(arguments: Any) -> dict[str, list[Source]]:
    """Return what is trained on ("train") and validated on ("valid"); empty: not of the arguments.

    With one blend for all splits both are the same, cut by `--split`.
    """

    def given(name: str) -> Any:
        return getattr(arguments, name, None)

    if given("dataloader_type") == "external":
        return {"train": [], "valid": []}
    if given("mock_data"):
        mock = [Source("--mock-data", "mock")]
        return {"train": mock, "valid": mock}
    if given("per_split_data_args_path"):
        blends = json.loads(Path(given("per_split_data_args_path")).read_text())
    elif given("data_args_path") or given("data_path"):
        blend = given("data_path") or Path(given("data_args_path")).read_text()
        blends = {"train": blend, "valid": blend}
    else:
        blends = {"train": given("train_data_path"), "valid": given("valid_data_path")}
    return {split: _sources(blends.get(split) or []) for split in ("train", "valid")}


def source_of(prefix: str, weight: str | None = None) -> Source:
    """Return a dataset by its path without .bin and .idx, or by that of one file."""
    files = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]
    if not all(file.is_file() for file in files):
        files = [Path(prefix)]
    if not all(file.is_file() for file in files):
        return Source(prefix, None, None, weight)
    hasher = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        hasher.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            hasher.update(stream.read(_END))
            stream.seek(max(0, size - _END))
            hasher.update(stream.read())
    return Source(prefix, hasher.hexdigest(), _count_tokens(prefix), weight, build_of(prefix))


def _sources(blend: str | Sequence[str]) -> list[Source]:
    """Return the sources of a blend: prefixes, or weights and prefixes in turns."""
    words = blend.split() if isinstance(blend, str) else list(blend)
    if len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        return [source_of(p, w) for w, p in zip(words[::2], words[1::2], strict=True)]
    return [source_of(prefix) for prefix in words]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _count_tokens(prefix: str) -> int | None:
    try:
        return int(open_tokens(prefix).size)
    except ValueError:  # another format: how much there is does not matter to the run
        return None
