"""What is done about a transfer whose headers told of a NaN, or of a mean decoded differently.

A cluster whose values are not finite has lost its progress and goes on from the anchors. Where
that does not help (say, its inner optimizer's moments are not finite either), all clusters stop
after some rounds, rather than train on without it unnoticed.
"""

from __future__ import annotations

import logging

import torch

from dsx.backends.base import Backend
from dsx.comm.base import COMPARISON, Pending, Submission, Transport
from dsx.guard import Verdict
from dsx.method import Method
from dsx.state import StateStore
from dsx.transfer import Arrived
from dsx.types import History

MOST_REFUSALS = 3  # of one fragment in a row, and one for each round that is under way
logger = logging.getLogger(__name__)


class ParityError(RuntimeError):
    """Clusters have applied different means, and the configuration says to stop."""


class NonFiniteError(RuntimeError):
    """A cluster keeps sending values that are not finite: its training has diverged."""


class Judge:
    """Acts on the verdicts of one rank's transfers, as every rank of every cluster does."""

    def __init__(
        self, method: Method, backend: Backend, transport: Transport, state: StateStore
    ) -> None:
        self._method = method
        self._backend = backend
        self._transport = transport
        self._state = state

    def judge(self, fragment: int, launched: int, verdict: Verdict, history: History) -> None:
        """Agree in the cluster on a transfer's verdict, in place; repair or stop if means differ.

        Collective over the cluster's ranks: one may own nothing of the fragment, or see in its
        shard what the others do not. NonFiniteError after too many refusals in a row.
        """
        flags = torch.zeros(3, self._transport.num_clusters)
        flags[0, verdict.refused_by] = 1
        flags[1, verdict.differing] = 1
        flags[2] = verdict.round
        flags = self._backend.max_over_ranks(flags)
        verdict.refused_by, verdict.differing = (
            [m for m, flag in enumerate(row) if flag] for row in flags[:2].tolist()
        )
        verdict.round = int(flags[2, 0])
        what = f"fragment {fragment} launched at step {launched}"
        history.refusals[fragment] = history.refusals[fragment] + 1 if verdict.refused_by else 0
        if verdict.refused_by:
            lost = _names(verdict.refused_by)
            refusals = history.refusals[fragment]
            if refusals >= MOST_REFUSALS + self._method.delay.rounds_under_way:
                raise NonFiniteError(
                    f"{what}: {lost} sent values that are not finite, and {refusals} rounds in a "
                    "row have been left out: training has diverged there; resume from a "
                    "checkpoint, with a lower learning rate or other data"
                )
            logger.error(
                "%s: %s sent values that are not finite; all clusters leave this round out", what,
                lost,
            )  # fmt: skip
        if verdict.differing:
            self._mend(fragment, verdict, what)

    def restarts(self, verdict: Verdict) -> bool:
        """Whether this cluster has lost its progress and goes on from the anchor."""
        has_anchor = self._method.outer_optimizer.keeps_anchor
        return has_anchor and self._transport.cluster_id in verdict.refused_by

    def begin_comparison(self, step: int) -> list[tuple[Verdict, Pending]]:
        """Start exchanging headers once more, at the end: no later transfer tells of the last."""
        started: list[tuple[Verdict, Pending]] = []
        for fragment, line in zip(self._backend.fragments, self._state.lines, strict=True):
            if self._state.is_sent(fragment.id):
                verdict, what = Verdict(), Submission(fragment.id, step, COMPARISON)
                pending = self._transport.submit(what, line.confirm(verdict))
                started.append((verdict, pending))
            else:
                started.append((Verdict(), Arrived(torch.empty(0))))
        return started

    def end_comparison(self, started: list[tuple[Verdict, Pending]], history: History) -> None:
        """Judge what the headers told. Collective, like `judge`."""
        for _, pending in started:
            pending.wait()
        for fragment, (verdict, _) in enumerate(started):
            self.judge(fragment, history.launched[fragment], verdict, history)

    def _mend(self, fragment: int, verdict: Verdict, what: str) -> None:
        message = (
            f"{what}: {_names(verdict.differing)} decoded another mean than cluster 0 in round "
            f"{verdict.round}"
        )
        if self._method.on_mismatch == "stop":
            raise ParityError(f"{message} (on_mismatch is 'stop'); resume from a checkpoint")
        logger.error("%s; taking cluster 0's outer state of the fragment", message)
        self._repair(fragment)

    def _repair(self, fragment: int) -> None:
        """Take cluster 0's outer state of a fragment, in fp32.

        Averaged parameters (no anchor) need no repair: the next mean brings them together.
        """
        slots = self._state.slots[fragment]
        shared = [slots.staleness[name] for name in self._method.staleness.shared_slots]
        for tensor in (self._state.anchor[fragment], *slots.outer.values(), *shared):
            if tensor.numel():
                wire = tensor.to("cpu", copy=True)
                self._transport.broadcast(fragment, wire)
                tensor.copy_(wire)


def _names(clusters: list[int]) -> str:
    return ", ".join(f"cluster {m}" for m in clusters)
