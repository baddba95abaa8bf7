"""A cluster's first rank makes of what all tell it something for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm.through_first import through_first
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from tests.comm.test_agreed_values import Counted
from tests.comm.test_rendezvous import together

RANKS = 6


def among_ranks(
    make: Callable[[list[Any]], Sequence[Any]], seconds: float = 20.0, absent: int | None = None
) -> tuple[list[Any], list[int]]:
    """Return what all get, or their errors, and how often each has asked the store."""
    shared = dist.HashStore()
    here = [rank for rank in range(RANKS) if rank != absent]
    stores = [Counted(shared) for _ in here]

    def one(rank: int, store: dist.Store) -> Any:
        info = RankInfo(1, 2, rank, RANKS)
        return through_first(store, "numbers", info, 10 * rank, make, seconds)

    ranks = zip(here, stores, strict=True)
    functions = [lambda rank=rank, store=store: one(rank, store) for rank, store in ranks]
    return together(*functions), [len(store.asked) for store in stores]


def test_each_rank_gets_its_own_whatever_their_number() -> None:
    def lists(numbers: list[int]) -> list[list[int]]:
        return [[number, sum(numbers)] for number in numbers]

    results, asked = among_ranks(lists)
    assert results == [[10 * rank, 150] for rank in range(RANKS)]
    assert asked == [4] + [3] * (RANKS - 1)


def test_an_error_of_the_first_rank_is_everyones() -> None:
    def fails(numbers: list[int]) -> list[int]:
        raise PeerLost("cluster 0 did not say it")

    results, _ = among_ranks(fails)
    assert [str(each) for each in results] == ["cluster 0 did not say it"] * RANKS
    assert all(isinstance(each, PeerLost) for each in results)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda numbers: [{}[number] for number in numbers], KeyError, "KeyError: 0"),
        (lambda numbers: numbers[1:], ValueError, "ValueError: zip() argument 2 is shorter than"),
        (lambda numbers: [object()] * RANKS, TypeError, "TypeError: Object of type object is not"),
    ],
)
def test_any_other_error_of_the_first_rank_is_told_to_all(
    make: Callable[[list[Any]], Sequence[Any]], error: type[Exception], said: str
) -> None:
    results, _ = among_ranks(make)
    assert isinstance(results[0], error)
    assert {type(each) for each in results[1:]} == {RuntimeError}
    for each in results[1:]:
        assert str(each).startswith(f"numbers: rank 0 of cluster 1 has failed: {said}")


def test_a_rank_that_does_not_come_is_named_by_all() -> None:
    results, _ = among_ranks(lambda numbers: numbers, 0.3, absent=4)
    assert len({*map(str, results)}) == 1 and isinstance(results[0], PeerLost)
    said = "numbers: cluster 1 waits for its rank(s) 4, which did not come within 0.3 s"
    assert str(results[1]).startswith(said)
