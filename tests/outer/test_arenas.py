"""Vectors that transfers take turns with: what somebody still needs is never given to another."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.core.membership import Membership, Seat
from dsx.outer.arenas import Arenas, TransferBuffers
from dsx.outer.hand_over import HandOver
from dsx.outer.parity_check import ParityResult
from dsx.outer.sideband import Sideband, SidebandShape


def vectors(count: int) -> list[Tensor]:
    return [torch.zeros(4) for _ in range(count)]


def arenas_of(
    under_way: int,
    sent: Sequence[Tensor],
    travelling: Sequence[Tensor] | None = None,
    is_shared: bool = False,
    passes_on: bool = False,
) -> Arenas:
    shape = SidebandShape(0, 0, 0, 2)
    sidebands = [
        (Sideband(shape, torch.zeros(0)), Sideband(shape, torch.zeros(0)), None)
        for _ in range(under_way)
    ]
    return Arenas(sidebands, sent, travelling, is_shared, passes_on)


def launch(arenas: Arenas, round: int) -> TransferBuffers:
    taken = arenas.take(round)
    assert taken is not None
    taken.sent.fill_(round)
    return taken


def average(buffers: TransferBuffers) -> None:
    """Let its exchange begin, and come to a mean of a tenth beyond the round."""
    buffers.begin().fill_(buffers.round + 0.1)


def apply(buffers: TransferBuffers) -> None:
    assert torch.equal(buffers.wire, torch.full((4,), buffers.round + 0.1))
    buffers.is_free = True


@pytest.mark.parametrize("under_way", [1, 2, 3])
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_each_finds_what_it_has_sent_and_its_mean(under_way: int, is_on_disk: bool) -> None:
    """Exchanges in order, as late as may be: a launch comes before the one before it has begun."""
    sent = vectors(under_way if is_on_disk else under_way + 1)
    arenas = arenas_of(under_way, sent, vectors(under_way) if is_on_disk else None)
    waiting: list[TransferBuffers] = []
    for round in range(1, 12):
        if len(waiting) == under_way:
            first = waiting.pop(0)
            for each in (first, *waiting) if round % 2 else (first,):
                if each.held_wire is None:
                    assert torch.equal(each.sent, torch.full((4,), float(each.round)))
                    average(each)
            assert first.holds(first.round)
            apply(first)
        waiting.append(launch(arenas, round))
        lacking = [each for each in waiting if each.held_wire is None]
        assert all(torch.equal(b.sent, torch.full((4,), float(b.round))) for b in lacking)


def test_what_was_sent_stays_until_the_next_one_has_begun() -> None:
    arenas = arenas_of(2, vectors(3))
    first = launch(arenas, 1)
    average(first)
    second = launch(arenas, 2)
    assert first.holds(1)  # somebody may lack its mean: it is made again from that
    apply(first)
    assert first.holds(1) and not first.holds(2)
    average(second)
    with pytest.raises(AssertionError, match="launch 1: what was sent is there no more"):
        _ = first.sent
    assert first.holds(1) and second.holds(2)  # its mean, until a launch takes it
    launch(arenas, 3)
    assert not first.holds(1)


def test_a_mean_that_may_still_be_read_makes_way_for_what_is_sent_alone() -> None:
    """That is copied to the host behind it; an exchange writes at once, and gets another."""
    arenas = arenas_of(2, vectors(3))
    waiting = [launch(arenas, 1)]
    means: list[Tensor] = []
    for round in range(2, 9):
        average(waiting[-1])
        waiting.append(launch(arenas, round))
        assert not means or waiting[-1].sent is means[-1]
        means.append(waiting[-2].wire)
        apply(waiting[-2])
        assert not any(waiting[-1].begin() is mean for mean in means[-1:])


def test_more_than_the_policy_said_is_no_transfer() -> None:
    arenas = arenas_of(1, vectors(2))
    launch(arenas, 1)
    assert arenas.take(2) is None
    arenas.free()
    begun_anew = launch(arenas, 1)
    with pytest.raises(AssertionError, match="launch 1: its exchange has not begun"):
        _ = begun_anew.wire
    average(begun_anew)
    assert begun_anew.holds(1)


def test_where_codes_are_made_at_the_launch_a_transfer_has_one_vector() -> None:
    arenas = arenas_of(2, vectors(2), is_shared=True)
    first, second = launch(arenas, 1), launch(arenas, 2)
    assert first.sent is first.wire is first.begin() and second.sent is second.wire
    assert first.sent is not second.sent


def test_a_mean_that_is_restored_alone_is_held() -> None:
    """What was sent is not needed of it; the mean is saved for who has not applied it yet."""
    taken = arenas_of(1, vectors(2)).take(7, sends=False)
    assert taken is not None and not taken.holds(7)
    taken.begin()
    assert taken.holds(7) and not taken.holds(6)


def test_a_mean_is_handed_over_as_it_was_though_its_vector_is_launched_from_again() -> None:
    arenas = arenas_of(1, vectors(2))
    buffers = arenas.take(7, sends=False)
    assert buffers is not None
    buffers.begin().copy_(torch.arange(4.0))
    buffers.parity = ParityResult(round=7, ids=[0, 1])
    seat = Seat(Membership.of(2), 0)
    channel: Any = SimpleNamespace(parity_check=SimpleNamespace(memory=torch.tensor([7])))
    attempt: Any = SimpleNamespace(buffers=buffers, round=7)
    exchange = HandOver(7, 0, (1,)).exchange(4, 0, seat, channel, attempt)
    next(exchange)  # what is told of it is on its way
    buffers.is_free = True  # it is applied, and training goes on
    launch(arenas, 8)
    (sent,) = next(exchange).outgoing[1]
    assert torch.equal(sent, torch.arange(4.0))
