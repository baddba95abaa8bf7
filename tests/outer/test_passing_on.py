"""Launches that take the memory of means: the bits of a run in which each has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from dsx.method.method import Method
from dsx.method.staleness import GapPenalty
from dsx.outer import state, work_space
from dsx.outer.arenas import TransferBuffers
from dsx.outer.passing_on import lent_bytes, passes_on
from tests.compress.channels import fragment_of
from tests.levels import by_default
from tests.outer.test_arenas import apply, arenas_of, average, launch, vectors
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

NUM_STEPS = 21
TAKING = [name for name, case in ALL_CASES.items() if passes_on(case.method(2), False, False)]
SHORT = ["diloco_delayed", "dilocox", "co2"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def trained(method: Method, not_finite_at: int = 0) -> Simulated:
    """`not_finite_at`: a step before which the second cluster's weights are spoilt."""
    # moments that are not finite would stay so
    run = Simulated(TinyNet(), sgd if not_finite_at else adamw, method, 2)
    for step in range(1, NUM_STEPS + 1):
        if step == not_finite_at:
            with torch.no_grad():
                next(iter(run.models[1].parameters())).fill_(torch.nan)
        run.train_step(mean_loss)
    return run


def require_same(ours: Simulated, theirs: Simulated) -> None:
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert all(torch.equal(own[name], other[name]) for name in other)
    for own, other in zip(ours.loops, theirs.loops, strict=True):
        assert own.history == other.history and min(own.history.rounds) >= 1
        for fragment in range(own.history.num_fragments):
            named = other.state.named_state(fragment)
            for name, tensor in own.state.named_state(fragment).items():
                assert torch.equal(tensor, named[name]), name


def num_vectors(run: Simulated) -> list[int]:
    arenas = run.loops[0].state._buffers
    return [len({id(t) for t in (*each._sent, *each._travelling)}) for each in arenas]


def test_which_methods_take_the_memory_of_means() -> None:
    """Those that are a round late, on a host; but for what launches keep, or encode at once."""
    assert {*SHORT} <= {*TAKING}
    method = ALL_CASES["diloco_delayed"].method(2)
    assert not passes_on(method, True, False) and not passes_on(method, False, True)
    for name in ("diloco", "streaming_diloco", "eager", "dreamddp"):
        assert name not in TAKING


@pytest.mark.parametrize("not_finite_at", [0, 9])
@pytest.mark.parametrize("name", by_default(TAKING, *SHORT))
def test_gives_the_bits_of_vectors_of_its_own(
    name: str, not_finite_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a cluster starts again from the anchors: what it launches is of before that."""
    method = ALL_CASES[name].method(2)
    monkeypatch.setattr(work_space, "LONGEST", 7)
    found = trained(method, not_finite_at)
    monkeypatch.setattr(state, "passes_on", lambda *_: False)
    expected = trained(method, not_finite_at)
    require_same(found, expected)
    refused = [loop.totals.refused for loop in found.loops]
    assert all(refused) if not_finite_at else not any(refused)
    assert num_vectors(found) == [method.max_in_flight] * len(num_vectors(found))
    assert num_vectors(expected) == [each + 1 for each in num_vectors(found)]


@dataclass(frozen=True)
class TellsWhatItRemembers(GapPenalty):
    """A penalty of a user's own."""

    def sideband(self, slots: Mapping[str, Tensor]) -> Tensor:
        return slots["last_update"]


def test_what_a_launch_tells_is_of_before_the_mean_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = replace(ALL_CASES["co2"].method(2), staleness=TellsWhatItRemembers("tensor"))
    found = trained(method)
    monkeypatch.setattr(state, "passes_on", lambda *_: False)
    require_same(found, trained(method))


def handed_on(first: TransferBuffers, second: TransferBuffers) -> None:
    """What a mean lies in becomes what the next launch sends, as it is applied."""
    mean = first.wire
    assert second.held_sent is None
    apply(first)
    first.pass_on(second)
    assert second.sent is mean and first.is_passed_on
    assert not first.holds(first.round) and first.held_sent is not None
    second.sent.fill_(second.round)


def test_as_many_vectors_as_transfers_are_enough() -> None:
    arenas = arenas_of(2, vectors(2), passes_on=True)
    waiting = launch(arenas, 1)
    for round in range(2, 9):
        average(waiting)
        due = arenas.take(round, sends=False)
        assert due is not None
        handed_on(waiting, due)
        assert torch.equal(waiting.sent, torch.full((4,), round - 1.0))  # may be made again
        waiting = due


def test_launches_of_all_fragments_are_lent_a_vector_each_where_means_leave_theirs() -> None:
    fragments = [fragment_of((64, 40)), fragment_of((70,))]
    late, early = (ALL_CASES[name].method(2) for name in ("dilocox", "diloco"))
    assert lent_bytes(late, fragments, False, False) == 4 * (64 * 40 + 70)
    assert not lent_bytes(late, fragments, True, False) + lent_bytes(late, fragments, False, True)
    assert not lent_bytes(early, fragments, False, False)


def test_one_that_cannot_wait_for_a_mean_gets_a_vector_beyond_them() -> None:
    """It is let go with what it was sent from: the exchange behind it has its own again."""
    arenas = arenas_of(2, vectors(2), passes_on=True)
    first = launch(arenas, 1)
    average(first)
    second = arenas.take(2, sends=False)
    assert second is not None
    second.lend()
    assert all(second.sent is not other for other in (*arenas._sent, first.sent, first.wire))
    second.sent.fill_(2)
    apply(first)
    average(second)
    assert any(second.wire is vector for vector in arenas._sent)
