"""Builds of several clusters: the same, nearly the same, or of other tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsx.data import ClusterBatches, ClusterShard, TokenWindows, build, require_same
from dsx.data.identity import build_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets `a`, its copy `same`, `near` with one document changed, and `other`."""
    root = tmp_path_factory.mktemp("datasets")
    for name in ("sources", "near sources", "other sources"):
        (root / name).mkdir()
    for number in range(30):
        text = f"document {number} " * 20
        (root / "sources" / f"{number}.txt").write_text(text)
        (root / "near sources" / f"{number}.txt").write_text(text if number else "changed " * 9)
        (root / "other sources" / f"{number}.txt").write_text(text[::-1])
    build([root / "sources"], root / "a")
    shutil.copytree(root / "a", root / "same")
    build([root / "near sources"], root / "near")
    build([root / "other sources"], root / "other")
    return root


def gathering(*datasets: Path) -> Callable[[Any], list[Any]]:
    """Return what gathers this cluster's value and those of others with these datasets."""
    others = [build_of(path / "train") for path in datasets]
    values = [None if one is None else json.loads(json.dumps(asdict(one))) for one in others]
    return lambda own: [own, *values]


def test_the_same_build_whatever_its_path(folder: Path) -> None:
    windows = TokenWindows(folder / "a" / "train", 16)
    told: list[Any] = []

    def gather(own: Any) -> list[Any]:
        told.append(own)
        return gathering(folder / "same")(own)

    shard = ClusterShard(windows, 0, 2)
    batches = ClusterBatches(
        windows, 1, cluster_id=0, num_clusters=2, rank=0, world_size=1, seed=0
    )  # fmt: skip
    for dataset in (windows, shard, batches):
        require_same(dataset, gather)
    digest = json.loads((folder / "a" / "dataset.json").read_text())["content_digest"]
    assert [value["content"] for value in told] == [f"{digest}/train"] * 3


@pytest.mark.parametrize(
    ("other", "said"), [("near", "about 9. % of the documents are in both"), ("other", "")]
)
def test_another_build_is_refused_by_name(folder: Path, other: str, said: str) -> None:
    windows = TokenWindows(folder / "a" / "train", 16)
    digests = [
        json.loads((folder / name / "dataset.json").read_text())["content_digest"]
        for name in ("a", other)
    ]
    pattern = (
        rf"cluster 0's .*a.train is {digests[0]}.train, and cluster 1's .* {digests[1]}.*{said}"
    )
    with pytest.raises(ValueError, match=pattern):
        require_same(windows, gathering(folder / other))


def test_a_copy_that_is_cut_or_of_no_build_counts_for_nothing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "copy")
    data = tmp_path / "copy" / "train.bin"
    data.write_bytes(data.read_bytes()[:-2])
    assert build_of(tmp_path / "copy" / "train") is None
    assert build_of(folder / "a" / "train") is not None
    assert build_of(folder / "a" / "dataset") is build_of(tmp_path / "none" / "train") is None
    require_same(TokenWindows(folder / "a" / "train", 16), gathering(tmp_path / "none"))


def test_another_tokenizer_is_refused(folder: Path) -> None:
    def gather(own: Any) -> Sequence[Any]:
        return [own, {**own, "tokenizer": "gpt2 0123"}]

    with pytest.raises(ValueError, match="'byte', that of cluster 1 .* 'gpt2 0123': the same ids"):
        require_same(TokenWindows(folder / "a" / "train", 16), gather)  # type: ignore[arg-type]
