"""A fragment's channel that is opened under another membership between two transfers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.comm.in_process import InProcessHub
from dsx.compress.base import Compressor, Dense, Launch
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.core.exchange import next_round
from dsx.core.membership import Member, Membership, Seat
from dsx.core.transport import Submission
from dsx.outer.channel import FragmentChannel
from dsx.outer.parity_check import ParityResult
from dsx.outer.sideband import Sideband, SidebandShape
from tests.compress.channels import bits, correlated, exact_mean, fragment_of, nmse
from tests.compress.matrices import EXACT, matrix
from tests.compress.test_quantized import decoded, mean_in_order

CODED, NUMEL = 64 * 40, 64 * 40 + 70
FRAGMENT = fragment_of((64, 40), (70,))
RANK = 8
TWO, THREE = (0, 2), (0, 1, 2)  # ids; cluster 2 is at position 1 and at position 2
GROWING_AND_SHRINKING = pytest.mark.parametrize(
    ("first", "second"), [(TWO, THREE), (THREE, TWO)], ids=["2 to 3", "3 to 2"]
)


def members(epoch: int, ids: Sequence[int]) -> Membership:
    return Membership(epoch, tuple(Member(id) for id in ids))


def once(x: Tensor) -> Callable[[], Tensor]:
    left = [x]

    def lay_out() -> Tensor:
        assert left, "another attempt, though all came to the same"
        return left.pop()

    return lay_out


@dataclass
class Told:
    """What one cluster has after a transfer."""

    mean: Tensor
    parity: ParityResult
    sideband: Sideband


class Channels:
    """One channel per cluster, by id; clusters come and go by `open`."""

    def __init__(self, compressor: Compressor, membership: Membership) -> None:
        self.compressor = compressor
        self.membership = membership
        self.by_id = {id: self._new(Seat(membership, id)) for id in membership.ids}
        self.round = 0

    def open(self, membership: Membership, is_healed: bool = True) -> None:
        """Pass to another membership; one that comes takes what clusters have in common."""
        self.membership = membership
        self.by_id = {id: channel for id, channel in self.by_id.items() if id in membership.ids}
        for id, channel in self.by_id.items():
            channel.open(Seat(membership, id))
        giver = next(iter(self.by_id.values()))
        for id in set(membership.ids) - set(self.by_id):
            self.by_id[id] = self._new(Seat(membership, id))
            own = {f"codec.{name}" for name in giver.codec.errors}
            for name in giver.slots.keys() - own if is_healed else ():
                self.by_id[id].slots[name].copy_(giver.slots[name])

    def transfer(self, values: Sequence[Tensor], seconds: float = 1.0) -> dict[int, Told]:
        """Average `values`, in the order of ids; every sideband tells of its cluster's id."""
        self.round += 1
        shape = SidebandShape(1, 1, 1, self.membership.num_clusters)
        told: dict[int, Told] = {}
        pending: list[Any] = []
        for transport, x in zip(InProcessHub(self.membership).transports(), values, strict=True):
            id, position = transport.seat.cluster_id, transport.seat.position
            sideband = Sideband(shape, torch.zeros(shape.numel))
            sideband.averages.fill_(id)
            sideband.post(position, [seconds * (id + 1)])
            told[id] = Told(x.clone(), ParityResult(), sideband)

            def measure(mean: Tensor, is_owner: bool = position == 0) -> Tensor:
                return mean[:1] * is_owner * shape.num_clusters

            exchange = self.by_id[id].exchange(
                x.clone(), x.isfinite().all().item, Launch(self.round, RANK), told[id].parity,
                sideband, measure, once(told[id].mean),
            )  # fmt: skip
            pending.append(transport.submit(Submission(0, self.round), exchange))
        for transfer in pending:
            transfer.wait()
        return told

    def _new(self, seat: Seat) -> FragmentChannel:
        return FragmentChannel(self.compressor, FRAGMENT, RANK, seat)


def agreed(told: dict[int, Told]) -> Tensor:
    """The mean; AssertionError unless all have its bits, and nothing was to be mended."""
    means = [t.mean for t in told.values()]
    assert all(torch.equal(bits(mean), bits(means[0])) for mean in means)
    assert all(t.parity == ParityResult(round=t.parity.round) for t in told.values())
    return means[0]


def check_sideband(told: dict[int, Told]) -> None:
    """Of every kind: the mean of ids, the largest of all, what the first member has measured."""
    for t in told.values():
        assert float(t.sideband.averages) == pytest.approx(sum(told) / len(told))
        assert t.sideband.by_cluster.shape == (1, len(told))
        assert t.sideband.by_cluster[0].tolist() == pytest.approx([id + 1 for id in told])
        assert float(t.sideband.largest()) == pytest.approx(max(told) + 1)
        assert float(t.sideband.of_owner) == pytest.approx(float(t.mean[0]), rel=1e-6)


@GROWING_AND_SHRINKING
def test_dense_means_are_of_those_who_are_there(first: Any, second: Any) -> None:
    channels = Channels(Dense(), members(0, first))
    for epoch, ids in ((0, first), (1, second), (2, first)):
        if epoch:
            channels.open(members(epoch, ids))
        for _ in range(2):
            values = correlated(NUMEL, len(ids), seed=epoch)
            told = channels.transfer(values)
            assert list(told) == list(ids)
            assert torch.equal(agreed(told), mean_in_order(values))
            check_sideband(told)


@GROWING_AND_SHRINKING
def test_quantized_means_go_on_with_the_residuals(first: Any, second: Any) -> None:
    """Of those who stay; one who comes has lost nothing yet."""
    channels = Channels(Quantized(error_feedback="fp32"), members(0, first))
    residuals = {id: torch.zeros(CODED) for id in THREE}
    for epoch, ids in ((0, first), (1, second)):
        if epoch:
            channels.open(members(epoch, ids))
        for _ in range(2):
            values = correlated(NUMEL, len(ids), seed=epoch)
            codes: list[Tensor] = []
            for id, x in zip(ids, values, strict=True):
                own = x[:CODED] + residuals[id]
                codes.append(decoded("int4", own, 64))
                residuals[id] = own - codes[-1]
            mean = agreed(told := channels.transfer(values))
            assert torch.equal(mean[:CODED], mean_in_order(codes))
            small = mean_in_order([x[CODED:].bfloat16().float() for x in values])
            assert torch.equal(mean[CODED:], small)
            check_sideband(told)


def of_rank(num_clusters: int, seed: int) -> list[Tensor]:
    """Every cluster's matrix of a quarter of `RANK`, and 70 other values."""
    spectrum = torch.linspace(2, 1, RANK // 4)
    rest = correlated(70, num_clusters, seed)
    return [
        torch.cat([matrix(64, 40, spectrum, 10 * seed + m), rest[m]]) for m in range(num_clusters)
    ]


@GROWING_AND_SHRINKING
@pytest.mark.parametrize("feedback", ["none", "fp32"])
def test_low_rank_means_go_on_warm(first: Any, second: Any, feedback: Any) -> None:
    """A matrix that the factors hold arrives whole, but for fp32, from whoever owns them now."""
    compressor = LowRank(rank=RANK, error_feedback=feedback, **EXACT)
    channels = Channels(compressor, members(0, first))
    for epoch, ids in ((0, first), (1, second), (2, first)):
        if epoch:
            warm = {n: t.clone() for n, t in channels.by_id[0].slots.items()}
            channels.open(members(epoch, ids))
            slots = channels.by_id[0].slots
            assert int(slots["codec.rank"]) == RANK and bool(slots["codec.q.w0"].any())
            assert slots.keys() == warm.keys()
            assert all(torch.equal(slots[name], tensor) for name, tensor in warm.items())
        for round in range(3):
            values = of_rank(len(ids), seed=3 * epoch + round)
            told = channels.transfer(values)
            assert nmse(agreed(told), exact_mean(values)) ** 0.5 <= 1e-4
            check_sideband(told)


@GROWING_AND_SHRINKING
def test_headers_name_clusters_by_id(first: Any, second: Any) -> None:
    channels = Channels(Dense(), members(0, first))
    channels.transfer(correlated(NUMEL, len(first)))
    channels.open(members(1, second))
    channels.by_id[2].parity_check.memory[1] += 1  # has applied something else
    values = correlated(NUMEL, len(second))
    values[-1][5] = torch.nan  # cluster 2's
    told = channels.transfer(values)
    for t in told.values():
        assert (t.parity.differing, t.parity.refused_by) == ([2], [2])
        assert t.parity.is_refused and t.parity.round == 1 and not t.mean.any()


def test_a_cluster_that_comes_with_nothing_is_told_from_the_others() -> None:
    """It has applied no mean that the others have, which its first header shows.

    What it would send is measured from another anchor, so that round is left out.
    """
    channels = Channels(Dense(), members(0, TWO))
    channels.transfer(correlated(NUMEL, 2))
    channels.open(members(1, THREE), is_healed=False)
    values = correlated(NUMEL, 3)
    told = channels.transfer(values)
    assert all(t.parity.differing == [1] for t in told.values())
    assert all(t.parity.is_refused and not t.mean.any() for t in told.values())
    assert torch.equal(agreed(channels.transfer(values)), mean_in_order(values))


@pytest.mark.parametrize(
    ("first", "second", "carried"),
    [
        ((0, 1, 2, 3), (0, 1, 2), False),  # no owners any more
        ((0, 1, 2, 3), (0, 1, 2, 3, 4), False),  # a slice as long, but of other elements
        ((0, 1, 2, 3), (0, 2, 3, 5), False),  # a slice of another length, by position
        ((0, 1, 2, 3), (0, 1, 2, 5), True),
    ],
)
def test_what_has_another_shape_or_place_starts_from_zero_and_is_told(
    first: Any, second: Any, carried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A mean's residual belongs to a slice, which goes by position; the values' own go on."""
    channels = Channels(Quantized(error_feedback="fp32"), members(0, first))
    channels.transfer(correlated(NUMEL, len(first)))
    channel = channels.by_id[2]
    before = {name: tensor.clone() for name, tensor in channel.slots.items()}
    own, of_mean = "codec.residual.0", "codec.residual.0.mean"
    assert before[own].any() and before[of_mean].any()
    with caplog.at_level(logging.WARNING):
        channel.open(Seat(members(1, second), 2))
    after = channel.slots
    assert torch.equal(after[own], before[own])
    assert torch.equal(after["parity_check.memory"], before["parity_check.memory"])
    assert (of_mean in after) == (len(second) > 3)
    if carried:
        assert torch.equal(after[of_mean], before[of_mean]) and not caplog.text
    else:
        assert of_mean not in after or not after[of_mean].any()
        assert "fragment 0: state of other elements than under the membership of epoch 1" in (
            caplog.text
        )
        assert caplog.text.strip().endswith("starts from zero: residual.0.mean")
    channels.open(members(2, second))
    values = correlated(NUMEL, len(second), seed=1)
    assert nmse(agreed(channels.transfer(values)), exact_mean(values)) < 0.02


def test_a_sideband_of_another_membership_is_refused() -> None:
    channel = FragmentChannel(Dense(), FRAGMENT, 0, Seat(members(0, TWO), 2))
    channel.open(Seat(members(1, THREE), 2))
    shape = SidebandShape(0, 1, 0, 2)
    with pytest.raises(ValueError, match=r"sideband for 2 cluster\(s\), .* epoch 1 has 3; make"):
        channel.exchange(
            torch.zeros(NUMEL), lambda: True, Launch(1), ParityResult(),
            Sideband(shape, torch.zeros(shape.numel)), None, once(torch.zeros(NUMEL)),
        )  # fmt: skip


def test_residuals_are_settled_with_a_turn_that_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save holds the gate for longer than any coding takes."""
    has_turn = Event()

    @contextmanager
    def turn() -> Generator[None, None, None]:
        has_turn.set()
        yield

    codec = LowRank(rank=RANK, error_feedback="fp32")
    channel = FragmentChannel(codec, FRAGMENT, RANK, Seat.of(0, 2), turn=turn)
    assert channel.before.settled
    gate, found = channel.before.gate, list[bool]()

    def settle(sent: Tensor, launch: Launch) -> None:
        found.append(gate.locked() and has_turn.is_set())

    monkeypatch.setattr(channel.codec, "settle", settle)
    with ThreadPoolExecutor(1) as thread:
        with gate:
            settled = thread.submit(channel._settle, torch.zeros(NUMEL), Launch(1))
            assert not has_turn.wait(0.2)
        settled.result(30.0)
    assert found == [True] and channel.before.is_settled(1)


@pytest.mark.parametrize("codec", [LowRank(rank=RANK), Quantized(error_feedback="fp32")])
def test_a_turn_is_held_while_something_is_coded_and_never_over_a_message(
    codec: Compressor,
) -> None:
    """Nor twice at a time by one thread, which would wait for itself."""
    held, taken = [False], [0]

    @contextmanager
    def turn() -> Generator[None, None, None]:
        assert not held[0]
        held[0], taken[0] = True, taken[0] + 1
        yield
        held[0] = False

    seats = [Seat.of(m, 2) for m in range(2)]
    channels = [FragmentChannel(codec, FRAGMENT, RANK, seat, turn=turn) for seat in seats]
    sent, shape = correlated(NUMEL, 2), SidebandShape(0, 1, 0, 2)
    exchanges = [
        channel.exchange(
            x, lambda: True, Launch(1, RANK), ParityResult(),
            Sideband(shape, torch.zeros(shape.numel)), None, x.clone,
        )
        for channel, x in zip(channels, sent, strict=True)
    ]  # fmt: skip
    messages = 0
    while rounds := [r for r, _ in map(next_round, exchanges) if r is not None]:
        assert not held[0]
        messages += 1
        for own, peer in ((0, 1), (1, 0)):
            pairs = zip(rounds[own].outgoing[peer], rounds[peer].incoming[own], strict=True)
            for data, place in pairs:
                place.copy_(data)
    assert messages >= 3 and taken[0] >= 2 * 3 and not held[0]
