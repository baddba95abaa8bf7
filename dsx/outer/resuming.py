"""After a resume: what one cluster has of a transfer and another lacks, and what nobody has.

Clusters save without waiting for each other, so of a transfer that was under way one may hold the
mean and another not; and one that was told to end may have saved at an earlier step than another.
The ranks of a lane tell each other what they hold, and all come to the same plan, by fragment:

- a mean that some hold and some lack is handed over by the first that holds it (hand_over.py);
- where a mean would not do (factors, means that are encoded by owners), and where nobody holds it,
  all make the attempt again, and those behind it, from the same contributions and the same state of
  before. A cluster that has yet to launch one meets the others when it does: launches are numbered
  from the beginning of the run.

Where one cluster lacks what the guard of others remembers, all begin to watch anew (guard.py).

What can neither be handed over nor made again is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from dsx.compress.base import Launch
from dsx.core.engine import EngineAdapter
from dsx.core.exchange import Exchange, to_all
from dsx.core.membership import Seat
from dsx.core.transport import HAND_OVER, RESUMING, Pending, Submission, Transport
from dsx.core.types import History
from dsx.outer.attempt import Attempts
from dsx.outer.guard import Guard, begin_all_anew
from dsx.outer.hand_over import HandOver
from dsx.outer.state import StateStore
from dsx.outer.transfer import NothingYet, Transfer

_ADVICE = (
    "resume with the layout and the number of clusters that saved it, or all clusters from an "
    "earlier checkpoint that they have saved at one step"
)


class Unresumed(Pending):
    """A restored transfer that nobody has yet taken up again."""

    def __init__(self, what: Submission) -> None:
        self._what = what

    def wait(self) -> Tensor:
        """Raise RuntimeError: what is to become of it is not known before clusters have met."""
        raise RuntimeError(f"{self._what}: not taken up again yet after a resume")

    @property
    def has_arrived(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Holding:
    """What one cluster's rank has of a fragment; rounds count its launches from 1.

    `launched` and `arrived` are the last rounds of either kind, `held` the first whose result is at
    hand, `redone` the first that an attempt can be made of again.
    """

    launched: int
    arrived: int
    held: int
    redone: int


@dataclass(frozen=True)
class FragmentPlan:
    """What is handed over, and the first round that all who have launched it attempt again.

    `lacking`: the round of which that can not be; 0: there is none.
    """

    handed: tuple[HandOver, ...]
    first_redone: int
    lacking: int = 0


def plan_fragment(holdings: Sequence[Holding], suffices: Callable[[int], bool]) -> FragmentPlan:
    """Return what becomes of a fragment's rounds under way, the same on every cluster.

    `suffices(round)`: a cluster that is given the mean can make its channel's state from it.
    """
    handed: list[HandOver] = []
    top = max(h.arrived for h in holdings)
    for round in range(min(h.arrived for h in holdings) + 1, top + 1):
        takers = tuple(m for m, h in enumerate(holdings) if h.arrived < round)
        giver = next((m for m, h in enumerate(holdings) if h.held <= round <= h.arrived), None)
        are_launched = all(holdings[m].launched >= round for m in takers)
        if are_launched and giver is not None and suffices(round):
            handed.append(HandOver(round, giver, takers))
        elif all(h.redone <= round for h in holdings):
            return FragmentPlan(tuple(handed), round)
        else:
            return FragmentPlan((), round, lacking=round)
    return FragmentPlan(tuple(handed), top + 1)


class Resuming:
    """One rank's part in taking up again what was under way, once a checkpoint is loaded.

    `last` are transfers that have been applied here and may be lacking elsewhere. Made by all
    clusters; `settle` then waits for them all.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        state: StateStore,
        attempts: Attempts,
        transport: Transport,
        history: History,
        in_flight: Sequence[Transfer | NothingYet],
        last: Sequence[Transfer],
        guard: Guard,
        allows_unequal_steps: bool = False,
    ) -> None:
        self._adapter = adapter
        self._state = state
        self._attempts = attempts
        self._transport = transport
        self._history = history
        self._guard = guard
        self._allows_unequal_steps = allows_unequal_steps
        under_way = [t for t in in_flight if isinstance(t, Transfer)]
        self._transfers = {
            f.id: {t.attempt.round: t for t in (*last, *under_way) if t.fragment == f.id}
            for f in adapter.fragments
            if state.is_sent(f.id)
        }
        self._told: list[Tensor] = []
        self._meeting: Pending | None = None
        self.handed: list[Pending] = []  # of those that this rank gives, or looks on at
        if self._transfers:
            what = Submission(min(self._transfers), 0, RESUMING)
            self._meeting = transport.submit(what, self._meet())

    def settle(self) -> None:
        """Wait for what all clusters hold, and start what follows; collective over a stage's ranks.

        ValueError, on all of them, if something can neither be handed over nor made again.
        """
        trouble = ""
        plans: dict[int, FragmentPlan] = {}
        if self._meeting is not None:
            self._meeting.wait()
            trouble = self._trouble_of_steps()
            for index, fragment in enumerate(self._transfers):
                plans[fragment] = plan = self._plan(index, fragment)
                if plan.lacking and not trouble:
                    trouble = self._trouble_of(fragment, plan.lacking, index)
            trouble = trouble or self._trouble_of_rungs()
        agreed = torch.zeros(2 + self._history.num_fragments, dtype=torch.float64)
        agreed[0] = bool(trouble)
        if self._told:
            agreed[1] = max(told[-1] for told in self._told)
            for index, fragment in enumerate(self._transfers):
                agreed[2 + fragment] = max(h.launched for h in self._holdings(index))
        is_troubled, lacks, *launched = self._adapter.ranks.max_over_ranks(agreed).tolist()
        if trouble:
            raise ValueError(trouble)
        if is_troubled:
            raise ValueError(
                "another rank could not take up what was under way; its error says why"
            )
        if lacks:
            begin_all_anew([int(launches) for launches in launched], self._history)
        for fragment, plan in plans.items():
            self._hand_over(fragment, plan)
            self._redo(fragment, plan.first_redone)

    def _meet(self) -> Exchange:
        """Tell every cluster what this rank holds, and hear the same of all."""
        seat = self._transport.seat
        rows = [astuple(self._holding(fragment)) for fragment in self._transfers]
        held = {
            fragment: [t.buffers.parity for t in of_one.values() if t.pending.has_arrived]
            for fragment, of_one in self._transfers.items()
        }
        lacks = self._guard.lacks(held, seat.ids, self._history)
        rungs = len(self._history.guard.get("rungs", ()))
        own = torch.tensor([self._history.step, *(v for row in rows for v in row), rungs, lacks])
        self._told = [torch.empty_like(own) for _ in seat.ids]
        self._told[seat.position].copy_(own)
        if seat.num_clusters > 1:
            yield to_all([own], [[theirs] for theirs in self._told], "what is held")
        return torch.empty(0)

    def _holding(self, fragment: int) -> Holding:
        transfers, launched = self._transfers[fragment], self._history.launches[fragment]
        lacking = [r for r, t in transfers.items() if not t.pending.has_arrived]
        arrived = min(lacking, default=launched + 1) - 1
        held = arrived + 1
        while held - 1 in transfers and not transfers[held - 1].buffers.is_passed_on:
            held -= 1
        before = self._state.channels[fragment].before
        with before.gate:
            can_redo = arrived in transfers and before.of(arrived) is not None
        return Holding(launched, arrived, held, arrived if can_redo else arrived + 1)

    def _holdings(self, index: int) -> list[Holding]:
        """Return what every cluster holds of the fragment in this place."""
        return [Holding(*told[1 + 4 * index : 5 + 4 * index].tolist()) for told in self._told]

    def _plan(self, index: int, fragment: int) -> FragmentPlan:
        channel = self._state.channels[fragment]
        return plan_fragment(self._holdings(index), lambda r: channel.can_recode(Launch(r)))

    def _trouble_of_steps(self) -> str:
        steps = [int(told[0]) for told in self._told]
        if self._allows_unequal_steps or len(set(steps)) == 1:
            return ""
        named = ", ".join(f"cluster {id}: {s}" for id, s in zip(self._seat.ids, steps, strict=True))
        return f"the clusters resume at different steps ({named}); give all of them one checkpoint"

    def _trouble_of_rungs(self) -> str:
        rungs, lacks = zip(*(told[-2:].tolist() for told in self._told), strict=True)
        if len({*rungs}) == 1 or not any(lacks):
            return ""
        return (
            "a cluster lacks what the guard of others remembers, and they have taken different "
            f"numbers of steps down ({', '.join(map(str, rungs))}); {_ADVICE}"
        )

    def _trouble_of(self, fragment: int, round: int, index: int) -> str:
        pairs = list(zip(self._seat.ids, self._holdings(index), strict=True))
        have, lack = (
            ", ".join(f"cluster {id}" for id, h in pairs if (h.arrived >= round) == has)
            for has in (True, False)
        )
        name = self._adapter.stage.name_of(fragment)
        return (
            f"{name}, launch {round}: {have} went on from its mean before saving, {lack} saved "
            f"without it, and it can neither be handed over nor averaged again; {_ADVICE}"
        )

    @property
    def _seat(self) -> Seat:
        return self._transport.seat

    def _hand_over(self, fragment: int, plan: FragmentPlan) -> None:
        channel, transfers = self._state.channels[fragment], self._transfers[fragment]
        for handed in plan.handed:
            transfer = transfers.get(handed.round)
            exchange = handed.exchange(
                self._state.wire_numel(fragment),
                self._state.sideband_numel(fragment),
                self._seat,
                channel,
                transfer.attempt if transfer else None,
            )
            what = Submission(fragment, handed.round, HAND_OVER)
            pending = self._transport.submit(what, exchange)
            if transfer is not None and self._seat.position in handed.takers:
                transfer.pending = pending
            else:
                self.handed.append(pending)

    def _redo(self, fragment: int, first: int) -> None:
        """Make the attempts from a round on, those that have ended here included."""
        transfers = {r: t for r, t in sorted(self._transfers[fragment].items()) if r >= first}
        if any(t.pending.has_arrived for t in transfers.values()):
            self._state.channels[fragment].before.put_back(first)
        for transfer in transfers.values():
            transfer.pending = self._attempts.submit(transfer.attempt, transfer.sync_params)
