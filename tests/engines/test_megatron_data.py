"""Which data Megatron-LM's arguments name, whichever of its ways names it."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from dsx.engines.megatron.data import source_of, sources_of_arguments
from tests.data.test_windows import write_indexed


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three datasets of 5, 6 and 7 tokens."""
    texts = [[[1, 2], [3, 4, 5]], [[1, 2, 3, 4, 5, 6]], [[7] * 7]]
    for name, documents in zip("abc", texts, strict=True):
        write_indexed(tmp_path / name, documents)
    return [str(tmp_path / name) for name in "abc"]


def read(**arguments: Any) -> dict[str, list[tuple[str, str | None, int | None]]]:
    found = sources_of_arguments(Namespace(**arguments))
    return {
        split: [(Path(s.name).name, s.weight, s.num_tokens) for s in sources]
        for split, sources in found.items()
    }


def test_every_way_to_name_data(prefixes: list[str], tmp_path: Path) -> None:
    a, b, c = prefixes
    blend = [("a", "0.3", 5), ("b", "0.7", 6)]
    words = ["0.3", a, "0.7", b]
    assert read(data_path=words) == {"train": blend, "valid": blend}
    assert read(data_path=[c]) == {"train": [("c", None, 7)], "valid": [("c", None, 7)]}
    assert read(data_path=[a, b])["train"] == [("a", None, 5), ("b", None, 6)]
    (tmp_path / "blend.txt").write_text(" ".join(words))
    assert read(data_args_path=str(tmp_path / "blend.txt")) == {"train": blend, "valid": blend}
    assert read(train_data_path=words, valid_data_path=[c], test_data_path=None) == {
        "train": blend,
        "valid": [("c", None, 7)],
    }
    splits = {"train": " ".join(words), "valid": [c], "test": [c]}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    given = {"per_split_data_args_path": str(tmp_path / "splits.json")}
    assert read(**given) == {"train": blend, "valid": [("c", None, 7)]}
    mock = [("--mock-data", None, None)]
    assert read(mock_data=True) == {"train": mock, "valid": mock}
    assert read(dataloader_type="external", data_path=[a]) == {"train": [], "valid": []}
    assert read() == {"train": [], "valid": []}


def test_content_tells_data_apart(prefixes: list[str], tmp_path: Path) -> None:
    a, b, _ = prefixes
    (tmp_path / "elsewhere").mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(f"{a}.{suffix}", tmp_path / "elsewhere" / f"copy.{suffix}")
    copied = source_of(str(tmp_path / "elsewhere" / "copy"))
    assert copied.digest is not None and copied.digest == source_of(a).digest
    assert copied.digest != source_of(b).digest
    data = bytearray(Path(f"{a}.bin").read_bytes())
    data[-1] ^= 1
    Path(f"{a}.bin").write_bytes(data)
    assert copied.digest != source_of(a).digest
    assert source_of("s3://bucket/data").digest is None
    (tmp_path / "chats.jsonl").write_text("{}")
    other = source_of(str(tmp_path / "chats.jsonl"))
    assert other.digest is not None and other.num_tokens is None
