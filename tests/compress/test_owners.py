"""Who averages which factors: as even as can be, and what is sent in every exchange round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.base import Launch
from dsx.compress.low_rank import LowRank
from dsx.compress.owners import factor_owners
from dsx.core.exchange import Exchange, ExchangeRound
from dsx.core.membership import Seat
from tests.compress.channels import correlated, drive, fragment_of

RANK = 8
LAYER = [(96, 32), (32, 32), (128, 32), (32, 128)]  # attention in and out, MLP up and down
SIDES = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=12)


@given(sides=SIDES, num_clusters=st.integers(1, 6), first=st.integers(0, 20))
def test_none_has_more_than_an_even_share_and_one_factor(
    sides: list[tuple[int, int]], num_clusters: int, first: int
) -> None:
    owners = factor_owners(sides, num_clusters, first)
    for factor in (0, 1):
        load: Counter[int] = Counter()
        for by, side in zip(owners, sides, strict=True):
            assert 0 <= by[factor] < num_clusters
            load[by[factor]] += side[factor]
        lengths = [side[factor] for side in sides]
        assert max(load.values()) <= sum(lengths) / num_clusters + max(lengths)


def test_a_transformers_layer_by_hand() -> None:
    """P: 128 + 32 | 96 + 32; Q: 128 | 32 + 32 + 32. By turns it were 224 | 64 and 64 | 160."""
    assert factor_owners(LAYER, 2, 0) == ((1, 0), (1, 0), (0, 0), (0, 1))
    assert factor_owners(LAYER, 2, 1) == ((0, 1), (0, 1), (1, 1), (1, 0))


@pytest.mark.parametrize("num_clusters", [2, 3, 5])
@pytest.mark.parametrize(
    "shards", [[LAYER], [LAYER * 3], [[(96, 64)]], [LAYER[:2], LAYER[2:]], [[(96, 64)]] * 2],
    ids=["layer", "three", "one matrix", "two ranks", "a matrix each"],
)  # fmt: skip
def test_what_is_declared_is_sent_in_every_exchange_round(
    shards: list[list[tuple[int, int]]], num_clusters: int
) -> None:
    """A round ends with the cluster that sends or receives most; a plan counts them one by one."""
    method = LowRank(rank=RANK, min_saving=1.0)
    for shard, shapes in enumerate(shards):
        fragment = fragment_of(*shapes, id=1)
        declared = method.traffic(fragment, num_clusters, Launch(2), shard)
        assert len(declared) == 4
        passed = exchanges_of_second_launch(shapes, shard, num_clusters)
        assert [list(map(tuple, of_round)) for of_round in declared] == passed


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_what_travels_beside_factors_is_counted_once(num_clusters: int) -> None:
    """An embedding in codes and a bias: the same from every cluster, with the first round."""
    fragment = fragment_of((96, 80), (300, 8), (96,), names=["a", "embed", "bias"])
    method = LowRank(rank=RANK, min_saving=1.0, exclude=("embed",))
    alone = fragment_of((96, 80), names=["a"])
    found, less = (method.traffic(f, num_clusters, Launch(2)) for f in (fragment, alone))
    assert len(found) == len(less) == 4 and (found[1:] == less[1:]).all()
    int4 = 300 * 8 // 2 + 2 * -(-300 * 8 // 64)
    beside = (num_clusters - 1) * (int4 + 2 * 96)
    assert (found[0] - less[0] == beside).all()


def exchanges_of_second_launch(
    shapes: list[tuple[int, int]], shard: int, num_clusters: int
) -> list[list[tuple[int, int]]]:
    """What every cluster's rank sends and receives; the first round would iterate twice."""
    method = LowRank(rank=RANK, min_saving=1.0)
    fragment = fragment_of(*shapes, id=1)
    seats = [Seat.of(m, num_clusters, shard) for m in range(num_clusters)]
    channels = [method.open(fragment, p, 0) for p in seats]
    for round in (1, 2):
        passed: list[list[tuple[int, int]]] = [[] for _ in seats]
        values = correlated(fragment.numel, num_clusters, seed=round)
        drive([
            recorded(channel.exchange(x, Launch(round)), p, passed[p.cluster_id])
            for channel, x, p in zip(channels, values, seats, strict=True)
        ])  # fmt: skip
    return [list(of_round) for of_round in zip(*passed, strict=True)]


def recorded(
    exchange: Exchange, seat: Seat, passed: list[tuple[int, int]]
) -> Generator[ExchangeRound, None, Tensor]:
    try:
        while True:
            round = next(exchange)
            received = [
                t.numel() * t.element_size() for m in seat.others for t in round.incoming[m]
            ]
            passed.append((round.bytes_sent(seat), sum(received)))
            yield round
    except StopIteration as stop:
        return stop.value
