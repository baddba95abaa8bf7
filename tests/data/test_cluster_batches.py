"""Clusters never share a window, ranks never share one in an epoch, and resume is exact."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.data import ClusterBatches, ClusterShard


@dataclass(frozen=True)
class Numbers:
    """Window i is [i, i, i]: a batch tells which windows it holds."""

    length: int
    window_length: int = 3

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> torch.Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.full((self.window_length,), index, dtype=torch.int64)


@dataclass(frozen=True)
class Setup:
    num_windows: int
    num_clusters: int
    world_size: int
    micro_batch_size: int
    seed: int

    def batches(self, cluster_id: int, rank: int) -> ClusterBatches:
        return ClusterBatches(
            Numbers(self.num_windows),
            self.micro_batch_size,
            cluster_id=cluster_id,
            num_clusters=self.num_clusters,
            rank=rank,
            world_size=self.world_size,
            seed=self.seed,
        )

    def cluster(self, cluster_id: int) -> list[ClusterBatches]:
        return [self.batches(cluster_id, rank) for rank in range(self.world_size)]

    def num_rounds(self) -> int:
        owned = self.num_windows // self.num_clusters
        return owned // (self.world_size * self.micro_batch_size)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_clusters = draw(st.integers(1, 5))
    world_size = draw(st.integers(1, 4))
    micro_batch_size = draw(st.integers(1, 3))
    least = num_clusters * world_size * micro_batch_size
    num_windows = draw(st.integers(least, 4 * least + 7))
    return Setup(num_windows, num_clusters, world_size, micro_batch_size, draw(st.integers(0, 99)))


def windows_of(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


def read(batches: ClusterBatches, num_batches: int) -> list[int]:
    return [window for _ in range(num_batches) for window in windows_of(next(batches))]


@settings(max_examples=60)
@given(setups())
def test_clusters_are_disjoint_and_ranks_share_an_epoch_without_repeats(setup: Setup) -> None:
    for cluster_id in range(setup.num_clusters):
        ranks = setup.cluster(cluster_id)
        num_rounds = setup.num_rounds()
        used = setup.num_windows // setup.num_clusters * setup.num_clusters
        owned = set(range(cluster_id, used, setup.num_clusters))
        for _ in range(3):
            epoch = [window for rank in ranks for window in read(rank, num_rounds)]
            assert len(epoch) == num_rounds * setup.world_size * setup.micro_batch_size
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= owned
            assert len(owned) - len(epoch) < setup.world_size * setup.micro_batch_size


@settings(max_examples=60)
@given(setups(), st.integers(0, 12), st.data())
def test_resume_continues_exactly_from_any_rank(
    setup: Setup, num_consumed: int, data: st.DataObject
) -> None:
    cluster_id = data.draw(st.integers(0, setup.num_clusters - 1))
    ranks = setup.cluster(cluster_id)
    for batches in ranks:
        read(batches, num_consumed)
    states = [batches.state_dict() for batches in ranks]
    assert all(state == states[0] for state in states)
    for rank, original in enumerate(ranks):
        resumed = setup.batches(cluster_id, rank)
        resumed.load_state_dict(states[data.draw(st.integers(0, setup.world_size - 1))])
        assert read(resumed, 7) == read(original, 7)


@settings(max_examples=60)
@given(setups(), st.integers(0, 12), st.integers(1, 4), st.integers(1, 3))
def test_another_world_size_goes_on_with_the_next_window(
    setup: Setup, num_consumed: int, world_size: int, micro_batch_size: int
) -> None:
    owned = setup.num_windows // setup.num_clusters
    if owned < world_size * micro_batch_size:
        return
    before = setup.batches(0, 0)
    read(before, num_consumed)
    state = before.state_dict()
    changed = Setup(setup.num_windows, setup.num_clusters, world_size, micro_batch_size, setup.seed)
    ranks = changed.cluster(0)
    for batches in ranks:
        batches.load_state_dict(state)
    rest = (owned - state["offset"]) // (world_size * micro_batch_size)
    seen = [window for batches in ranks for window in read(batches, rest)]
    order = Setup(setup.num_windows, setup.num_clusters, 1, 1, setup.seed).batches(0, 0)
    order.load_state_dict({**state, "offset": 0})
    epoch = read(order, owned)
    expected = epoch[state["offset"] : state["offset"] + rest * world_size * micro_batch_size]
    assert sorted(seen) == sorted(expected)


def test_ranks_take_interleaved_samples_of_the_cluster_order() -> None:
    whole = read(Setup(48, 2, 1, 1, 7).batches(1, 0), 24)
    ranks = Setup(48, 2, 3, 2, 7).cluster(1)
    first = [windows_of(next(batches)) for batches in ranks]
    assert first == [whole[rank:6:3] for rank in range(3)]


def test_epochs_seeds_and_clusters_have_their_own_order() -> None:
    batches = Setup(60, 2, 1, 30, 1).batches(0, 0)
    first, second = read(batches, 1), read(batches, 1)
    assert sorted(first) == sorted(second) == list(range(0, 60, 2))
    assert first != second
    other_seed = read(Setup(60, 2, 1, 30, 2).batches(0, 0), 1)
    assert other_seed != first
    neighbour = read(Setup(60, 2, 1, 30, 1).batches(1, 0), 1)
    assert [window - 1 for window in neighbour] != first


def test_the_order_is_frozen() -> None:
    """A checkpoint of today must resume anywhere: these numbers may never change."""
    assert read(Setup(20, 2, 1, 1, 1234).batches(1, 0), 12) == [
        3,
        9,
        1,
        19,
        7,
        13,
        11,
        5,
        15,
        17,
        9,
        19,
    ]


def test_batch_shape_and_dtype() -> None:
    batch = next(iter(Setup(40, 2, 2, 4, 0).batches(0, 1)))
    assert batch.shape == (4, 3) and batch.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("seed", Setup(40, 2, 1, 1, 1)),
        ("num_clusters", Setup(40, 4, 1, 1, 0)),
        ("num_windows", Setup(41, 2, 1, 1, 0)),
    ],
)
def test_mismatch_names_both_values_and_changes_nothing(name: str, changed: Setup) -> None:
    saved = Setup(40, 2, 1, 1, 0).batches(0, 0)
    read(saved, 3)
    state = saved.state_dict()
    resumed = changed.batches(0, 0)
    before = resumed.state_dict()
    with pytest.raises(ValueError, match=rf"{name}={state[name]}, this run has {name}="):
        resumed.load_state_dict(state)
    assert resumed.state_dict() == before


def test_other_cluster_window_length_and_damage_are_refused() -> None:
    setup = Setup(40, 2, 1, 1, 0)
    state = setup.batches(0, 0).state_dict()
    with pytest.raises(ValueError, match="cluster_id=0, this run has cluster_id=1"):
        setup.batches(1, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="window_length=5, this run has window_length=3"):
        setup.batches(0, 0).load_state_dict({**state, "window_length": 5})
    with pytest.raises(ValueError, match=r"offset=21 is damaged; .*offset in 0..20"):
        setup.batches(0, 0).load_state_dict({**state, "offset": 21})
    del state["seed"]
    with pytest.raises(ValueError, match="seed=None, this run has seed=0"):
        setup.batches(0, 0).load_state_dict(state)


def test_impossible_setups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 2 window\(s\), one round .* needs 4"):
        Setup(4, 2, 2, 2, 0).batches(0, 0)
    with pytest.raises(ValueError, match=r"cluster_id=2 must lie in 0..1 \(num_clusters=2\)"):
        Setup(40, 2, 1, 1, 0).batches(2, 0)
    with pytest.raises(ValueError, match=r"rank=-1 must lie in 0..0"):
        Setup(40, 2, 1, 1, 0).batches(0, -1)
    with pytest.raises(ValueError, match="micro_batch_size=0 must be at least 1"):
        Setup(40, 2, 1, 0, 0).batches(0, 0)
    with pytest.raises(ValueError, match="seed=-1 must not be negative"):
        Setup(40, 2, 1, 1, -1).batches(0, 0)
    with pytest.raises(ValueError, match="leave none for cluster_id=2"):
        ClusterShard(Numbers(2), 2, 3)


@given(st.integers(1, 5), st.integers(0, 40))
def test_shards_are_disjoint_and_of_equal_length(num_clusters: int, extra: int) -> None:
    dataset = Numbers(num_clusters + extra)
    shards = [ClusterShard(dataset, m, num_clusters) for m in range(num_clusters)]
    owned = [[int(window[0]) for window in shard] for shard in shards]
    used = len(dataset) // num_clusters * num_clusters  # unequal lengths would be unequal steps
    for cluster_id, windows in enumerate(owned):
        assert windows == list(range(cluster_id, used, num_clusters))
        assert len(shards[cluster_id]) == len(windows)
    assert sorted(window for windows in owned for window in windows) == list(range(used))


def test_a_shard_says_what_it_reads(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert str(ClusterShard(Numbers(10), 1, 3)) in caplog.text
    assert "cluster 1 of 3 reads 3 of 10 samples: 1, 4, ..., 7" in caplog.text
    assert str(ClusterShard(Numbers(10), 0, 1)) == "all 10 samples are read"


def test_shard_feeds_a_data_loader() -> None:
    loader = torch.utils.data.DataLoader(ClusterShard(Numbers(10), 1, 3), batch_size=2)
    assert [windows_of(batch) for batch in loader] == [[1, 4], [7]]
