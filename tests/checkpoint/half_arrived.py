"""Clusters in one process whose means come to some of them only, and runs that go on from there."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.outer_state import load_state
from dsx.comm.in_process import InProcessHub, InProcessPending, pass_round
from dsx.comm.topology import RankInfo
from dsx.core.exchange import HEADER_BYTES, ExchangeRound, next_round
from dsx.core.transport import Pending
from dsx.engines.simulated import SimulatedClusters
from dsx.outer.transfer import Transfer
from tests.checkpoint.saved import save_state

Loss = Callable[[torch.nn.Module, int, int], Tensor]


class HoldingHub(InProcessHub):
    """Those that are `held` send all that others need, but do not get what comes last.

    If all are, they stop in the midst of it, when the first codes have come.
    """

    held: Collection[int] = ()

    def submit(self, fragment: int, pending: InProcessPending) -> None:
        """As the hub does."""
        self._require_same_launch(pending)
        queues = self._queues.setdefault(fragment, [deque() for _ in self.membership.ids])
        queues[pending.seat.position].append(pending)
        while all(queues):
            self._run([queue.popleft() for queue in queues])

    def _run(self, group: list[InProcessPending]) -> None:
        for pending in group:
            pending.bytes_sent += HEADER_BYTES * (len(group) - 1)
        free = [place for place in range(len(group)) if place not in self.held]
        rounds: list[ExchangeRound | None] = []
        for pending in group:
            round, pending.result = next_round(pending.exchange)
            rounds.append(round)
        if None in rounds:
            return  # one cluster alone
        for number in itertools.count():
            pass_round(group, rounds, is_first=number == 0)
            for place in free:
                rounds[place], group[place].result = next_round(group[place].exchange)
            if (free and rounds[free[0]] is None) or (not free and number == 1):
                return
            for place in self.held:
                rounds[place], group[place].result = next_round(group[place].exchange)


class Impatient:
    """In the place of a `StopPlace`: puts off what has not come."""

    def may_receive(self, pending: Pending | None) -> bool:
        return pending is None or pending.has_arrived


def hold(run: SimulatedClusters, held: Collection[int]) -> None:
    """From the next exchange on; what is due and has not come is put off."""
    transport: Any = run.loops[0].transport
    transport._hub.held = held
    impatient: Any = Impatient()
    for loop in run.loops:
        loop.stop_place = impatient


def take_inner_step(run: SimulatedClusters, cluster: int, loss: Loss) -> None:
    model, optimizer = run.models[cluster], run.optimizers[cluster]
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.zero_grad()
    loss(model, cluster, run.loops[cluster].history.step + 1).backward()
    optimizer.step()


def advance(run: SimulatedClusters, cluster: int, loss: Loss) -> None:
    """Let one cluster alone take an inner step, and pass its boundary."""
    take_inner_step(run, cluster, loss)
    run.loops[cluster].after_inner_step()


def save_all(run: SimulatedClusters, base: Path, keeps_last: bool = False) -> None:
    for m, loop in enumerate(run.loops):
        here = RankInfo(m, run.num_clusters, 0, 1)
        save_state(loop, base / f"{m}", here, "run", {}, {}, keeps_last=keeps_last)


def resume(run: SimulatedClusters, first: SimulatedClusters, base: Path) -> None:
    """Load every cluster's state and the inner one beside it; new ones are as cluster 0."""
    for m, loop in enumerate(run.loops):
        source = m if m < first.num_clusters else 0
        run.models[m].load_state_dict(first.models[source].state_dict())
        inner: Any = first.optimizers[source]
        optimizer: Any = run.optimizers[m]
        optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
        here = RankInfo(m, run.num_clusters, 0, 1)
        load_state(loop, base / f"{source}", here, {})
    for loop in run.loops:
        loop.settle()


def catch_up(run: SimulatedClusters, loss: Loss) -> None:
    """Let clusters that are behind take their steps together; then all end their boundary."""
    for step in range(max(loop.history.step for loop in run.loops)):
        behind = [m for m, loop in enumerate(run.loops) if loop.history.step == step]
        for m in behind:
            take_inner_step(run, m, loss)
            run.loops[m].launch_due()
        for m in behind:
            run.loops[m].apply_ripe()
    for loop in run.loops:
        loop.end_boundary()


def lacking(run: SimulatedClusters) -> list[list[int]]:
    """Which of its transfers in flight every cluster has no mean of."""
    return [
        [i for i, t in enumerate(loop.in_flight)
         if isinstance(t, Transfer) and not t.pending.has_arrived]
        for loop in run.loops
    ]  # fmt: skip


def assert_same(ours: SimulatedClusters, theirs: SimulatedClusters) -> None:
    """All that two runs hold, bit for bit."""
    for m, (a, b) in enumerate(zip(ours.loops, theirs.loops, strict=True)):
        assert a.history == b.history
        mine, expected = ours.models[m].state_dict(), theirs.models[m].state_dict()
        assert [n for n in expected if not torch.equal(mine[n], expected[n])] == []
        for fragment in range(a.history.num_fragments):
            state, wanted = (x.state.named_state(fragment) for x in (a, b))
            assert state.keys() == wanted.keys()
            assert [n for n in wanted if not torch.equal(state[n], wanted[n])] == [], m
