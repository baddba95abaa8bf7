"""Who averages which factors: as even as can be, and as the planner has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsx.comm.swap import Exchange, Peers, Swap
from dsx.compress.base import Launch
from dsx.compress.low_rank import LowRank
from dsx.compress.owners import factor_owners
from dsx.plan.payload import HEADERS_BYTES, line_bytes, parts_of
from dsx.plan.settings import Coding, Notes
from tests.compress.channels import correlated, drive, fragment_of

RANK = 8
LAYER = [(96, 32), (32, 32), (128, 32), (32, 128)]  # attention in and out, MLP up and down
SIZES = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=12)


@given(sizes=SIZES, num_clusters=st.integers(1, 6), first=st.integers(0, 20))
def test_none_has_more_than_an_even_share_and_one_factor(
    sizes: list[tuple[int, int]], num_clusters: int, first: int
) -> None:
    owners = factor_owners(sizes, num_clusters, first)
    for factor in (0, 1):
        load: Counter[int] = Counter()
        for by, size in zip(owners, sizes, strict=True):
            assert 0 <= by[factor] < num_clusters
            load[by[factor]] += size[factor]
        lengths = [size[factor] for size in sizes]
        assert max(load.values()) <= sum(lengths) / num_clusters + max(lengths)


def test_a_transformers_layer_by_hand() -> None:
    """P: 128 | 96 + 32, then 32; Q: 128 | 32 + 32 + 32. Every matrix by turns: 224 and 160."""
    assert factor_owners(LAYER, 2, 0) == [(1, 0), (1, 0), (0, 0), (0, 1)]
    assert factor_owners(LAYER, 2, 1) == [(0, 1), (0, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize("num_clusters", [2, 3, 5])
@pytest.mark.parametrize("shapes", [LAYER, LAYER * 3, [(96, 64)]], ids=["layer", "three", "one"])
def test_the_planner_knows_how_long_swaps_of_factors_hold_the_line(
    shapes: list[tuple[int, int]], num_clusters: int
) -> None:
    """A swap ends with the cluster that sends or receives most, so their bytes add up."""
    method = LowRank(rank=RANK, min_saving=1.0)
    fragment = fragment_of(*shapes, id=1)
    peers = [Peers(m, num_clusters) for m in range(num_clusters)]
    channels = [method.open(fragment, p, 0) for p in peers]
    for round in (1, 2):  # the first one iterates twice
        held: list[Counter[int]] = [Counter() for _ in peers]
        values = correlated(fragment.numel, num_clusters, seed=round)
        launch = Launch(round)
        drive([
            recorded(channel.exchange(x, launch), p, held[p.cluster_id])
            for channel, x, p in zip(channels, values, peers, strict=True)
        ])  # fmt: skip
    coding = Coding("low_rank", rank=RANK, max_rank=RANK, min_saving=1.0)
    predicted = line_bytes(parts_of(fragment, coding, 1), coding, Notes(), num_clusters)
    measured = sum(max(of_swap) for of_swap in zip(*(h.values() for h in held), strict=True))
    assert predicted == measured + HEADERS_BYTES * (num_clusters - 1)


def recorded(exchange: Exchange, peers: Peers, held: Counter[int]) -> Generator[Swap, None, Tensor]:
    """Add up, swap by swap, what the busier direction of a cluster's line carries."""
    try:
        while True:
            swap = next(exchange)
            received = [
                t.numel() * t.element_size() for m in peers.others for t in swap.incoming[m]
            ]
            held[len(held)] = max(swap.bytes_sent(peers), sum(received))
            yield swap
    except StopIteration as stop:
        return stop.value
