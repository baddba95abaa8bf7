"""What a way of running costs: money, days, and the time that losses of clusters take.

Losses come one by one, each cluster's after `mtbf_hours` on average, whatever the others do. A lost
cluster trains nothing until it has been started and healed, and what it had not sent is gone: of
its fragments half a period on average, and what was under way. The others stand still for as long
as a loss may hold them up (docs/elastic.md). Of two clusters the one that is left waits until the
other has been started again: five minutes here, as no measurement tells of other people's machines.
With a method that brings nobody back all start again from a checkpoint, which `heal_seconds` tells,
and do again what came after it: half of the steps between two saves, where these are told.

Where saves are told of, all stand still for each of them. Losses of half and more at once are not
in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsx.outer.memory import slots_bytes
from dsx.outer.return_refusal import why_not
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question
from dsx.plan.link import wire_bytes
from dsx.plan.predict import Prediction

HELD_UP_SECONDS = 2.0  # of the others' training threads, at most, where a loss is noticed at once
RESTART_SECONDS = 300.0
_HEAL_PER_LINE = 2.0  # healing takes twice what the line takes for the copy, by dsx bench heal
_GB = 1e9
_HOUR, _DAY = 3600.0, 86400.0


@dataclass(frozen=True)
class Budget:
    """What was said of money, length and losses; None is not said.

    `egress_price` is of a GB (1e9 bytes) that leaves a cluster, frames and all; `gpu_hour_price` of
    an hour of one rank; `steps` the inner steps of each cluster; `mtbf_hours` the mean time between
    two losses of one cluster; `heal_seconds` from a loss until that cluster trains again; every
    `save_every` inner steps training waits `save_seconds` for a save.
    """

    egress_price: float | None = None
    gpu_hour_price: float | None = None
    steps: float | None = None
    mtbf_hours: float | None = None
    heal_seconds: float | None = None
    save_every: float | None = None
    save_seconds: float | None = None

    @property
    def has_goodput(self) -> bool:
        """Whether there is more than waits for the line that takes from the time."""
        return self.mtbf_hours is not None or self.save_every is not None

    @property
    def has_prices(self) -> bool:
        """Whether anything has a price."""
        return self.egress_price is not None or self.gpu_hour_price is not None

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be worked out."""
        return self.has_prices or self.steps is not None or self.has_goodput


@dataclass(frozen=True)
class Bill:
    """What it comes to, all clusters together, for the run (`days`) or, if `days` is None, a day.

    `goodput` is the share of the time that computes what is kept: the utilization, less losses and
    saves; None without either, or where it is not known how long a loss takes. `gpu_price` and
    `egress_price` are in the money of the prices, None without that price.
    """

    goodput: float | None
    heal_seconds: float | None
    days: float | None
    gpu_price: float | None
    egress_price: float | None

    @property
    def price(self) -> float | None:
        """Return what is known of it, in sum."""
        known = [price for price in (self.gpu_price, self.egress_price) if price is not None]
        return sum(known) if known else None


def bill_of(candidate: Candidate, question: Question, budget: Budget) -> Bill:
    """Return what a candidate costs."""
    prediction, method = candidate.prediction, candidate.method
    copied, refuses = 0.0, why_not(method)
    heal = budget.heal_seconds
    if not refuses:
        outer, numel = method.outer_optimizer, question.model.numel
        copied = 4.0 * numel + slots_bytes(outer, outer.slots, numel)
        rate = question.link.payload_bytes_per_second
        heal = _HEAL_PER_LINE * copied / rate if heal is None else heal
    kept = None
    if budget.mtbf_hours is not None and heal is not None:
        kept = _kept(candidate, question.num_clusters, budget, heal, not refuses)
    healed = 0.0  # bytes a day
    if budget.mtbf_hours is not None:
        healed = question.num_clusters * copied * _DAY / (budget.mtbf_hours * _HOUR)
    return _bill(prediction, question, budget, kept, heal, healed)


def data_parallel_bill(prediction: Prediction, question: Question, budget: Budget) -> Bill:
    """Return what all gradients in every step cost, without a loss: one would end that run."""
    return _bill(prediction, question, budget, None, None, 0.0)


def _bill(
    prediction: Prediction,
    question: Question,
    budget: Budget,
    kept: float | None,
    heal: float | None,
    healed: float,
) -> Bill:
    days = None
    unsaved = _unsaved(prediction, budget)
    up = unsaved * (1.0 if kept is None else kept)
    if budget.steps is not None:
        seconds = budget.steps * prediction.round_seconds / prediction.steps_per_round
        days = seconds / up / _DAY
    length = 1.0 if days is None else days
    gpu = egress = None
    if budget.gpu_hour_price is not None:
        ranks = question.num_clusters * question.model.ranks
        gpu = budget.gpu_hour_price * ranks * 24 * length
    if budget.egress_price is not None:
        sent = sum(prediction.bytes_by_cluster) * _DAY / prediction.round_seconds
        egress = budget.egress_price * wire_bytes(sent * up + healed) / _GB * length
    is_known = kept is not None or (budget.has_goodput and budget.mtbf_hours is None)
    goodput = prediction.utilization * up if is_known else None
    return Bill(goodput, heal, days, gpu, egress)


def _kept(
    candidate: Candidate, num_clusters: int, budget: Budget, heal: float, comes_back: bool
) -> float:
    """Return the share of a run's cluster seconds that losses leave."""
    assert budget.mtbf_hours is not None
    prediction, mtbf = candidate.prediction, budget.mtbf_hours * _HOUR
    step = prediction.round_seconds / prediction.steps_per_round
    late = candidate.method.delay.rounds_under_way * candidate.interval
    in_vain = step * (candidate.interval / 2 + late + candidate.overlap_steps)
    if not comes_back:  # all start again, from what was saved last
        again = step * (budget.save_every or 0.0) / 2
        return mtbf / (mtbf + num_clusters * (heal + again))
    others = RESTART_SECONDS if num_clusters == 2 else HELD_UP_SECONDS
    own = mtbf / (mtbf + heal + in_vain)
    return own * mtbf / (mtbf + (num_clusters - 1) * others)


def _unsaved(prediction: Prediction, budget: Budget) -> float:
    """Return the share of the time in which training does not wait for a save."""
    if budget.save_every is None or budget.save_seconds is None:
        return 1.0
    between = budget.save_every * prediction.round_seconds / prediction.steps_per_round
    return between / (between + budget.save_seconds)
