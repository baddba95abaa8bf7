"""Who averages which factors: as even as can be, and what is sent in every exchange round."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.base import Launch
from dsx.compress.blocks import factor_owners
from dsx.compress.low_rank import LowRank
from dsx.compress.owners import factor_rounds
from dsx.compress.wire.formats import FORMATS
from dsx.core.exchange import Exchange, ExchangeRound
from dsx.core.membership import Seat
from tests.compress.channels import correlated, drive, fragment_of

RANK = 8
LAYER = [(96, 32), (32, 32), (128, 32), (32, 128)]  # attention in and out, MLP up and down
SIDES = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 64)),
    min_size=1,
    max_size=12,
)


def loads(
    matrices: Sequence[tuple[int, int, int]], num_clusters: int, first: int, factor: int
) -> list[int]:
    """How many elements of a factor each cluster averages; blocks lie side by side."""
    load = [0] * num_clusters
    for by, sides in zip(
        factor_owners(tuple(matrices), num_clusters, first), matrices, strict=True
    ):
        blocks = (by.p, by.q)[factor]
        assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
        assert blocks[-1].stop == sides[factor] and all(b.length > 0 for b in blocks)
        assert by.qr in [b.owner for b in by.p]
        for block in blocks:
            load[block.owner] += block.length * sides[2]
    return load


@given(matrices=SIDES, num_clusters=st.integers(1, 40), first=st.integers(0, 20))
def test_none_has_more_than_an_even_share_and_one_factor(
    matrices: list[tuple[int, int, int]], num_clusters: int, first: int
) -> None:
    for factor in (0, 1):
        load = loads(matrices, num_clusters, first, factor)
        sizes = [sides[factor] * sides[2] for sides in matrices]
        assert sum(load) == sum(sizes)
        assert max(load) <= sum(sizes) / num_clusters + max(sizes)


STAGE = [(3072, 8192, 1718), (8192, 1024, 700), (6144, 8192, 2048), (8192, 3072, 1718)] * 2


@pytest.mark.parametrize("num_clusters", [8, 13, 16, 32, 128])
def test_among_many_clusters_factors_are_cut_until_all_have_as_much(num_clusters: int) -> None:
    """Two layers of the 107 B, a slice each."""
    for factor in (0, 1):
        load = loads(STAGE, num_clusters, 0, factor)
        assert max(load) <= 1.1 * sum(load) / num_clusters


@pytest.mark.parametrize("num_clusters", [8, 16, 32, 128])
def test_what_a_cluster_sends_and_receives_is_that_of_an_ideal_all_reduce(
    num_clusters: int,
) -> None:
    """int4 there and int8 back: five percent above, and nobody ten above the mean of all."""
    ranks = tuple(rank for *_, rank in STAGE)
    rounds = factor_rounds(tuple(STAGE), ranks, FORMATS["int4"](), num_clusters, 0)
    elements = sum((m + n) * rank for m, n, rank in STAGE)
    ideal = (num_clusters - 1) / num_clusters * elements * (4.25 / 8 + 1)
    both = rounds.sum(axis=0)
    assert (both.mean(axis=0) <= 1.05 * ideal).all()
    assert (both.max(axis=0) <= 1.1 * both.mean(axis=0)).all()


def test_with_few_clusters_none_is_cut() -> None:
    """A P in parts is sent once more, to who makes it orthonormal: an eighth of it at most."""
    for num_clusters in range(1, 8):
        assert not any(by.is_cut for by in factor_owners(((8192, 8192, 64),), num_clusters, 0))
    (by,) = factor_owners(((8192, 8192, 64),), 8, 3)
    assert [block.owner for block in by.p] == [3, 4, 5, 6, 7, 0, 1, 2]
    assert [block.owner for block in by.q] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_who_hands_a_p_back_averages_less_by_as_much() -> None:
    """By hand: of 2 x 8192 columns among 8, and 8192 that 3 hands to 7 others, 1,024 of its own
    count as much. (16384 + 1024) / 8 = 2,176 are everybody's, half of it of either factor: 1,088
    columns; of 3 they are 1,152 less, half of that: 512, and 64 more by the multiples of 16.
    """
    (by,) = factor_owners(((8192, 8192, 64),), 8, 3)
    assert by.qr == 3
    for blocks in (by.p, by.q):
        assert {b.length for b in blocks if b.owner != 3} == {1088}
        assert [b.length for b in blocks if b.owner == 3] == [576]


@pytest.mark.parametrize("num_clusters", [8, 16, 32, 128])
@pytest.mark.parametrize(
    "shapes",
    [
        [(94208, 8192)],
        [(8192, 47104)],
        [(8192, 8192), (10240, 8192), (94208, 8192), (8192, 47104)],
        [(152576, 8192), (10240, 8192)],
    ],
    ids=["wide", "long", "layer", "embedding"],
)
def test_nobody_sends_much_more_where_few_matrices_are_cut(
    shapes: list[tuple[int, int]], num_clusters: int
) -> None:
    """As DeepSpeed's ranks have them: one P is most of what there is, and one cluster makes it."""
    matrices = tuple((m, n, 2048) for m, n in shapes)
    rounds = factor_rounds(matrices, (2048,) * len(shapes), FORMATS["int4"](), num_clusters, 5)
    sent = rounds[:, :, 0].sum(axis=0)
    assert sent.max() <= 1.1 * sent.mean()


def test_a_transformers_layer_by_hand() -> None:
    """P: 128 + 32 | 96 + 32; Q: 128 | 32 + 32 + 32. By turns it were 224 | 64 and 64 | 160."""
    layer = tuple((m, n, RANK) for m, n in LAYER)

    def of(first: int) -> list[tuple[int, int]]:
        return [(by.p[0].owner, by.q[0].owner) for by in factor_owners(layer, 2, first)]

    assert of(0) == [(1, 0), (1, 0), (0, 0), (0, 1)]
    assert of(1) == [(0, 1), (0, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize("num_clusters", [2, 3, 5, 9])
@pytest.mark.parametrize(
    "shards", [[LAYER], [LAYER * 3], [[(96, 64)]], [LAYER[:2], LAYER[2:]], [[(96, 64)]] * 2,
     [[(700, 500), (300, 64)]]],
    ids=["layer", "three", "one matrix", "two ranks", "a matrix each", "cut by nine"],
)  # fmt: skip
def test_what_is_declared_is_sent_in_every_exchange_round(
    shards: list[list[tuple[int, int]]], num_clusters: int
) -> None:
    """A round ends with the cluster that sends or receives most; a plan counts them one by one."""
    method = LowRank(rank=RANK, min_saving=1.0)
    for shard, shapes in enumerate(shards):
        fragment = fragment_of(*shapes, id=1)
        declared = method.traffic(fragment, num_clusters, Launch(2), shard)
        matrices = tuple((m, n, RANK) for m, n in shapes)
        owners = factor_owners(matrices, num_clusters, fragment.id + shard)
        is_cut = any(by.is_cut for by in owners)
        assert (
            is_cut
            if shapes[0] == (700, 500) and num_clusters == 9
            else num_clusters == 9 or not is_cut
        )
        assert len(declared) == (6 if is_cut else 4)
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
