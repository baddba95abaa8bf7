"""What kind of windows each cluster reads: disjoint, equally many, and as unlike as asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsx.data.windows
from dsx.data import ClusterBatches, ClusterShard, TokenWindows
from dsx.data.shards import SHARDS, Shards
from dsx.examples import arguments
from tests.data.test_cluster_batches import Numbers, read
from tests.data.test_windows import write_indexed

LENGTH = 8


class Keyed(Numbers):
    """Window i is [i, i, i], and is the like of all i of the same remainder."""

    def shard_keys(self) -> npt.NDArray[np.int64]:
        return np.array([-(i % 5) for i in range(len(self))])


def batches(shards: Shards, cluster_id: int = 0, num_windows: int = 40) -> ClusterBatches:
    return ClusterBatches(
        Keyed(num_windows), 2, cluster_id=cluster_id, num_clusters=3, rank=0, world_size=1,
        seed=5, shards=shards,
    )  # fmt: skip


@settings(max_examples=40)
@given(st.sampled_from(SHARDS), st.integers(1, 5), st.integers(0, 40))
def test_no_window_is_of_two_clusters_and_all_have_as_many(
    shards: Shards, num_clusters: int, extra: int
) -> None:
    dataset = Keyed(num_clusters + extra)
    parts = [ClusterShard(dataset, m, num_clusters, shards) for m in range(num_clusters)]
    owned = [[int(window[0]) for window in part] for part in parts]
    count = len(dataset) // num_clusters
    assert [len(windows) for windows in owned] == [count] * num_clusters
    everything = [window for windows in owned for window in windows]
    assert len(set(everything)) == len(everything)


def test_the_quickstarts_script_offers_all_of_them() -> None:
    assert (*SHARDS, "own") == arguments.SHARDS


def test_stretches_and_kinds_by_hand() -> None:
    def owned(shards: Shards) -> list[list[int]]:
        parts = [ClusterShard(Keyed(10), m, 2, shards) for m in range(2)]
        return [[int(window[0]) for window in part] for part in parts]

    assert owned("contiguous") == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    # keys fall with i % 5: 4 and 9 come first, then 3 and 8, 2 | 7, 1 and 6, 0 and 5
    assert owned("skewed") == [[2, 3, 4, 8, 9], [0, 1, 5, 6, 7]]


@pytest.mark.parametrize("shards", SHARDS)
def test_an_epoch_reads_each_window_once_and_resume_is_exact(shards: Shards) -> None:
    original = batches(shards, 1)
    own = sorted(int(window[0]) for window in original.shard)
    epoch = read(original, 6)  # 12 of 13 windows: rounds of two
    assert len(set(epoch)) == 12 and set(epoch) < set(own)
    state = original.state_dict()
    resumed = batches(shards, 1)
    resumed.load_state_dict(state)
    assert read(resumed, 9) == read(original, 9)


def test_a_position_belongs_to_its_kind_of_shards() -> None:
    state = batches("skewed").state_dict()
    with pytest.raises(ValueError, match="has shards=skewed, this run has shards=iid"):
        batches("iid").load_state_dict(state)
    earlier = batches("iid").state_dict()
    del earlier["shards"]  # as it was saved when there was one kind
    batches("iid").load_state_dict(earlier)
    with pytest.raises(ValueError, match="has shards=iid, this run has shards=contiguous"):
        batches("contiguous").load_state_dict(earlier)


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(
        ValueError, match="shards='sorted' is not known; allowed: 'iid', 'contiguous', 'sk"
    ):
        ClusterShard(Numbers(10), 0, 2, "sorted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs a dataset with shard_keys\(\), .* Numbers has"):
        ClusterShard(Numbers(10), 0, 2, "skewed")


def corpus(path: Path) -> TokenWindows:
    """Three kinds of documents, one after the other, the last of them mixed."""
    rng = np.random.default_rng(0)
    kinds = [rng.integers(low, high, 4000).tolist() for low, high in ((0, 60), (40, 100), (0, 100))]
    return TokenWindows(write_indexed(path / "x", kinds), LENGTH)


def divergence(windows: TokenWindows, shards: Shards, num_clusters: int = 3) -> float:
    """Jensen and Shannon's, of the clusters' frequencies of tokens, in nats."""
    parts = [ClusterShard(windows, m, num_clusters, shards) for m in range(num_clusters)]
    counts = [torch.bincount(torch.cat([w[:-1] for w in part]), minlength=100) for part in parts]
    shares = torch.stack([c / c.sum() for c in counts]).double()
    entropy = torch.special.entr(torch.cat([shares, shares.mean(0)[None]])).sum(1)
    return float(entropy[-1] - entropy[:-1].mean())


def test_clusters_read_other_distributions(tmp_path: Path) -> None:
    windows = corpus(tmp_path)
    alike, stretches, skewed = (divergence(windows, shards) for shards in SHARDS)
    assert alike < 0.02  # what so few tokens differ by
    assert stretches > 10 * alike
    assert skewed > 10 * alike


def test_keys_are_the_sums_of_inputs_whatever_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = corpus(tmp_path)
    expected = [int(window[:-1].sum()) for window in windows]
    assert windows.shard_keys().tolist() == expected
    monkeypatch.setattr(dsx.data.windows, "_TOKENS_AT_A_TIME", 5 * LENGTH + 3)
    assert windows.shard_keys().tolist() == expected
