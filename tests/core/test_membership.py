"""Who averages: what a membership may be, where a rank sits in it, what is refused and how."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.in_process import InProcessHub
from dsx.compress.averaging import ExactMean
from dsx.compress.base import Compressor, Dense
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.compress.top_k import TopK
from dsx.core.membership import Member, Membership, Seat
from tests.compress.channels import fragment_of


def of_ids(*ids: int, epoch: int = 3) -> Membership:
    return Membership(epoch, tuple(Member(id) for id in ids))


@given(ids=st.sets(st.integers(0, 50), min_size=1), shard=st.integers(0, 3))
def test_seats_are_in_the_order_of_ids(ids: set[int], shard: int) -> None:
    membership = of_ids(*sorted(ids))
    assert membership.num_clusters == len(ids)
    assert [membership.position_of(id) for id in membership.ids] == list(range(len(ids)))
    for position, id in enumerate(membership.ids):
        seat = Seat(membership, id).of_shard(shard)
        assert (seat.position, seat.cluster_id, seat.shard) == (position, id, shard)
        assert (seat.num_clusters, seat.ids) == (len(ids), tuple(sorted(ids)))
        assert sorted([*seat.others, position]) == list(range(len(ids)))


def test_a_number_of_clusters_is_a_membership_from_the_beginning_on() -> None:
    expected = Membership(0, (Member(0, 1.0), Member(1, 1.0), Member(2, 1.0)))
    assert Membership.of(3) == expected
    assert Seat.of(2, 3, 1) == Seat(expected, cluster_id=2, shard=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Membership.of(0), "num_clusters=0 must be at least 1"),
        (lambda: of_ids(), "epoch 3 has no members; give it at least one"),
        (lambda: of_ids(0, epoch=-1), "epoch=-1 of a membership must be at least 0"),
        (lambda: of_ids(2, 0), r"epoch 3 has members \[2, 0\]: ids must be .* ascending"),
        (lambda: of_ids(0, 2, 2), r"members \[0, 2, 2\]: ids must be .* different"),
        (lambda: of_ids(-1, 2), r"members \[-1, 2\]: ids must be at least 0"),
        (lambda: Seat(of_ids(0, 2), 1), r"cluster 1 is not in the membership of epoch 3, .*\[0, 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Member("0"), "a member's id must be an integer, not '0'"),
        (lambda: Member(True), "a member's id must be an integer, not True"),
        (lambda: Member(1.0), "a member's id must be an integer, not 1.0"),
        (lambda: Member(1, "2"), "weight='2' of cluster 1 must be a number"),
        (lambda: Member(1, None), "weight=None of cluster 1 must be a number"),
        (lambda: Membership(0.5, (Member(0),)), "epoch of a membership must be an integer, .* 0.5"),
        (lambda: Membership(0, [Member(0)]), r"members=\[.*\] of .* must be a tuple of Member"),
        (lambda: Membership(0, (0, 1)), r"members=\(0, 1\) of .* must be a tuple of Member"),
        (lambda: Membership(0, 2), "members=2 of a membership must be a tuple of Member"),
        (lambda: Membership.of("2"), "num_clusters must be an integer, not '2'"),
        (lambda: Seat(2, 0), r"membership=2 of a seat must be a Membership; Seat.of"),
        (lambda: Seat.of("0", 2), "cluster_id must be an integer, not '0'"),
        (lambda: Seat.of(0, 2, None), "shard must be an integer, not None"),
    ],
)
def test_what_has_another_type_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"cluster 2 weight={weight}: .*finite and above 0"):
        Membership(1, (Member(0), Member(2, weight)))


@pytest.mark.parametrize(
    "compressor",
    [Dense(), Quantized(), LowRank(rank=4, min_saving=1.0), TopK(), RandomTopK()],
    ids=lambda compressor: type(compressor).__name__,
)
def test_every_mean_refuses_unequal_weights(compressor: Compressor) -> None:
    fragment, message = fragment_of((32, 40), (7,)), r"weights 1 \(cluster 0\), 2.5 \(cluster 2\)"
    seat = Seat(Membership(4, (Member(0), Member(2, 2.5))), 2)
    with pytest.raises(ValueError, match=f"epoch 4 has the {message}: .* the same weight"):
        compressor.open(fragment, seat, 4)
    equal = Membership(4, (Member(0, 2.5), Member(2, 2.5)))
    assert compressor.open(fragment, Seat(equal, 2), 4) is not None


def test_the_exact_mean_refuses_unequal_weights() -> None:
    with pytest.raises(ValueError, match="means are not weighted yet"):
        ExactMean(Seat(Membership(0, (Member(0), Member(1, 3.0))), 0))


def test_a_hub_hands_out_a_seat_to_every_member() -> None:
    membership = of_ids(0, 2)
    transports = InProcessHub(membership).transports()
    assert [t.seat for t in transports] == [Seat(membership, 0), Seat(membership, 2)]
