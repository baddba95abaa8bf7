"""The guard: how outer training is doing, from what is exchanged in any case.

A few thousand elements stand for each fragment, the same on all clusters: every n-th as it
travels. A cluster tells the square of its own in the parity check's header, in bits that were
free there. Where a mean is applied its sample is compared with that of the round before, and the
ranks of a cluster add their sums up in the collective that agrees on the header (recovery.py). So
no message more is sent, and the figures (method/health.py) are the same bits on every rank of a
stage in all clusters: products of fp32 in fp64, which are exact, added up in an order of their own.

What it remembers is 16 kB per fragment and rank, and in checkpoints. Where clusters may remember
different things all forget: after a mean that was decoded differently, and where one cluster has
come back without what the others have (`begin_all_anew`). What is to be forgotten is in
`History.guard`, so it is in checkpoints, too.

With `guard.action` "step_down" an alarm leads down the ladder (method/ladder.py), once the header
of the fragment's next launch has told that all had decoded the mean alike; behind the ends of the
configured periods, where the stages of a pipeline tell each other. Then all averages start anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.types import History
from dsx.method.alarms import Alarm, judge
from dsx.method.health import Figures, Sums, figures_of
from dsx.method.ladder import LEADS_DOWN, Ladder
from dsx.method.method import Method
from dsx.outer.parity_check import ParityResult

logger = logging.getLogger(__name__)
SAMPLED = 4096  # elements of a fragment on a rank


def sample_of(x: Tensor) -> Tensor:
    """Return the elements that stand for a vector; an odd stride, as rows have even lengths."""
    stride = -(-x.numel() // SAMPLED)
    return x[:: stride | 1]


def product_of(x: Tensor, y: Tensor) -> float:
    """Return the scalar product of two samples: the same on any machine.

    Halves are added to each other, elementwise, until one number is left: no kernel's own order.
    """
    terms = torch.zeros(SAMPLED, dtype=torch.float64)
    torch.mul(x.double(), y.double(), out=terms[: x.numel()])
    length = SAMPLED
    while length > 1:
        length //= 2
        terms = terms[:length].add_(terms[length:])
    return terms.item()


def square_of(x: Tensor) -> float:
    """Return the square of a vector's sample."""
    sample = sample_of(x).to("cpu")
    return product_of(sample, sample)


class Guard:
    """One rank's samples of the means applied last; does nothing where it is off."""

    def __init__(self, method: Method, adapter: EngineAdapter, speaks: bool) -> None:
        """`speaks`: whether alarms are told by this rank."""
        self._method, self._adapter = method, adapter
        self.ladder = Ladder(method, len(adapter.fragments), adapter.stage.count)
        self._speaks = speaks and not adapter.ranks.shard[0]
        self.is_active = method.guards
        self.last = [torch.empty(0) for _ in adapter.fragments]  # samples, by fragment
        self._squares = [0.0] * len(self.last)  # of those
        self._lacks: set[int] = set()  # fragments of a checkpoint that says nothing of theirs
        self._found: Tensor | None = None  # of the mean that is being applied
        self._square = 0.0

    def begin_anew(self, fragment: int, sample: Tensor | None) -> None:
        """Go on from a checkpoint's sample, None if it has none for this rank."""
        self._lacks.discard(fragment)
        if sample is None:
            self._lacks.add(fragment)
        kept = torch.empty(0) if sample is None else sample.clone()
        self._keep(fragment, kept, product_of(kept, kept))

    def lacks(
        self,
        arrived: Mapping[int, Sequence[ParityResult]],
        ids: Sequence[int],
        history: History,
    ) -> bool:
        """Whether a checkpoint brought less than other clusters may have.

        `arrived` are the transfers whose mean is here, by fragment.
        """
        if not self.is_active:
            return False
        forgotten = history.guard.get("forgotten", ())
        is_new = [not history.rounds[f] or f in forgotten for f in self._lacks]
        parities = [parity for of_one in arrived.values() for parity in of_one]
        are_known = [parity.is_refused or _are_known(parity, ids) for parity in parities]
        return not (all(is_new) and all(are_known))

    def look(
        self, fragment: int, mean: Tensor, parity: ParityResult, places: Sequence[int]
    ) -> None:
        """Put this rank's sums of a mean that has come into `parity.sums`, to be added up.

        `places` are the ids of all clusters that the run may have: 0 for who has not averaged.
        """
        if not self.is_active:
            return
        found, last = sample_of(mean).clone(), self.last[fragment]
        self._found = found
        if not found.numel():
            parity.sums = [0.0] * (3 + len(places))
            return
        squares = [{id: square for id, square in parity.squares}.get(id, 0.0) for id in places]
        if not _are_known(parity, parity.ids):  # of other clusters, or as others had it
            squares = [math.nan] * len(places)
        is_known = last.numel() == found.numel()
        product = product_of(found, last) if is_known else math.nan
        before = self._squares[fragment] if is_known else math.nan
        parity.sums = [product_of(found, found), before, product, *squares]
        self._square = parity.sums[0]

    def take(
        self,
        fragment: int,
        launch: int,
        parity: ParityResult,
        places: Sequence[int],
        history: History,
    ) -> dict[str, Any]:
        """Return the figures for a record, once the cluster's ranks have added up; of no refusal.

        The mean's sample takes the place of the one before. What is out of bounds is told.
        """
        if not self.is_active or parity.is_refused or self._found is None:
            return {}
        self._keep(fragment, self._found, self._square)
        self._found = None
        if _is_silent(fragment, launch, history):
            return {}
        mean, before, product, *squares = parity.sums
        clusters = [s for id, s in zip(places, squares, strict=True) if id in parity.ids]
        if _was_forgotten(fragment, history):
            before = product = math.nan
        sums = Sums(mean, before, product, clusters)
        outer = self.ladder.outer_optimizer(history)
        named = _named(figures_of(sums, outer, self._method.codes_keep_norms), parity.ids)
        round = history.rounds[fragment] + 1
        alarms = judge(fragment, round, named, history, self._method)
        told = [alarm for alarm in alarms if alarm.is_told]
        for alarm in told if self._speaks else ():
            name = self._adapter.stage.name_of(fragment)
            logger.warning("%s", alarm.sentence(name, round, named.get("norm_ratio_of")))
        if told:
            named["guard_alarms"] = [alarm.bound.kind for alarm in told]
        if self.ladder.is_active:
            _wait_for_agreement(fragment, launch, parity.round, alarms, history)
        if rungs := self.ladder.taken(history):
            named["guard_rungs"] = [*rungs]
        return named

    def settle(self, history: History) -> None:
        """Before the step behind a configured period, take the rung that its alarms lead to.

        In place. Collective over the cluster's ranks then, where it has several stages; not at the
        boundary itself, which a stage may leave for a checkpoint before another one.
        """
        is_end = history.step and not history.step % self._method.schedule.interval
        if not (self.ladder.is_active and is_end):
            return
        stage, due = self._adapter.stage, history.guard.pop("due", [])
        if stage.count > 1:
            own = torch.tensor([float(kind in due) for kind in LEADS_DOWN])
            agreed = self._adapter.ranks.max_over_stages(own).tolist()
            due = [kind for kind, flag in zip(LEADS_DOWN, agreed, strict=True) if flag]
        rung = self.ladder.next_rung(history) if due else None
        if rung is None:
            return
        history.guard["rungs"] = [*self.ladder.taken(history), rung]
        for judged in ("averages", "pending"):
            history.guard.pop(judged, None)
        if self._speaks and not stage.index:
            logger.warning("%s", self.ladder.sentence(due, history))

    def _keep(self, fragment: int, sample: Tensor, square: float) -> None:
        self.last[fragment], self._squares[fragment] = sample, square


def forget(fragment: int, history: History) -> None:
    """Have all clusters forget the mean before and the averages: one may have had another."""
    averages: dict[str, Any] = history.guard.get("averages", {})
    for name in [name for name in averages if name.startswith(f"{fragment}/")]:
        del averages[name]
    history.guard.get("pending", {}).pop(str(fragment), None)
    history.guard.pop("told", None)
    history.guard["forgotten"] = sorted({fragment, *history.guard.get("forgotten", [])})


def begin_all_anew(launched: Sequence[int], history: History) -> None:
    """Have all clusters forget all but the rungs, up to the first mean launched later than any yet.

    `launched`: by fragment, the launches of the cluster that has most.
    """
    kept = {"rungs": rungs} if (rungs := history.guard.get("rungs")) else {}
    history.guard = {**kept, "silent": {str(f): count for f, count in enumerate(launched)}}


def _wait_for_agreement(
    fragment: int, launch: int, compared: int, alarms: Sequence[Alarm], history: History
) -> None:
    """Keep what this mean's figures lead to until it is known that all have decoded it alike.

    `compared`: the launch whose mean this one's headers have compared; that is known now.
    """
    pending: dict[str, Any] = history.guard.setdefault("pending", {})
    of, kinds = pending.pop(str(fragment), (0, []))
    if of == compared and kinds:
        history.guard["due"] = sorted({*kinds, *history.guard.get("due", [])})
    if found := [alarm.bound.kind for alarm in alarms if alarm.bound.kind in LEADS_DOWN]:
        pending[str(fragment)] = [launch, found]


def _was_forgotten(fragment: int, history: History) -> bool:
    """Return whether the mean before is not to be used; later ones then are."""
    forgotten: list[int] = history.guard.get("forgotten", [])
    if fragment not in forgotten:
        return False
    history.guard["forgotten"] = [other for other in forgotten if other != fragment]
    return True


def _is_silent(fragment: int, launch: int, history: History) -> bool:
    """Return whether a mean is one of those to be kept silent of; the first later one is, too."""
    silent: dict[str, int] = history.guard.get("silent", {})
    until = silent.get(str(fragment))
    if until is None:
        return False
    if launch > until:  # what is remembered from now on is the same everywhere
        del silent[str(fragment)]
    return True


def _are_known(parity: ParityResult, ids: Sequence[int]) -> bool:
    """Return whether a transfer's headers have told every cluster's square, of just these."""
    are_there = [id for id, _ in parity.squares] == [*ids]
    return are_there and not any(math.isnan(square) for _, square in parity.squares)


def _named(figures: Figures, ids: Sequence[int]) -> dict[str, Any]:
    whose = None if figures.farthest is None else ids[figures.farthest]
    named = {
        "autocorrelation": figures.autocorrelation,
        "cluster_cosine": figures.cosine,
        "norm_ratio": figures.norm_ratio,
        "norm_ratio_of": whose,
        "effective_gain": figures.gain,
    }
    return {name: value for name, value in named.items() if value is not None}
