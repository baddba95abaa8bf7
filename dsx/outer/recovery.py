"""What is done about a transfer whose headers told of a NaN, or of a mean decoded differently.

A cluster whose values are not finite has lost its progress and goes on from the anchors. Where
that does not help (say, its inner optimizer's moments are not finite either), all clusters stop
after some rounds, rather than train on without it unnoticed; at once, where there is no anchor. So
they do where a cluster skips all its inner steps, round after round: it has nothing to send.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from dsx.core.engine import EngineAdapter
from dsx.core.transport import Transport
from dsx.core.types import History, RoundsInARow
from dsx.method.method import Method
from dsx.outer.parity_check import ParityResult
from dsx.outer.state import StateStore
from dsx.outer.transfer import Transfer

MOST_REFUSALS = 3  # of one fragment in a row, and one for each round that is under way
logger = logging.getLogger(__name__)


class ParityError(RuntimeError):
    """Clusters have applied different means, and the configuration says to stop."""


class NonFiniteError(RuntimeError):
    """A cluster's values, or all its gradients, stay not finite: its training has diverged."""


class Recovery:
    """Acts on the parity results of one rank's transfers, as every rank of every cluster does."""

    def __init__(
        self, method: Method, adapter: EngineAdapter, transport: Transport, state: StateStore
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._transport = transport
        self._state = state

    def act_on(self, fragment: int, launched: int, parity: ParityResult, history: History) -> None:
        """Agree in the cluster on a transfer's result, in place; repair or stop if means differ.

        Collective over the cluster's ranks: one may own nothing of the fragment, or see in its
        shard what the others do not. NonFiniteError after too many refusals in a row.
        """
        membership = self._transport.seat.membership
        flags = torch.zeros(4, membership.num_clusters)
        for row, clusters in enumerate((parity.refused_by, parity.differing, parity.idle_in)):
            flags[row, [membership.position_of(id) for id in clusters]] = 1
        flags[3] = parity.round
        flags = self._adapter.ranks.max_over_ranks(flags)
        parity.refused_by, parity.differing, parity.idle_in = (
            [id for id, flag in zip(membership.ids, row, strict=True) if flag]
            for row in flags[:3].tolist()
        )
        parity.round = int(flags[3, 0])
        parity.is_refused = parity.is_refused or bool(parity.refused_by)
        what = f"{self._adapter.stage.name_of(fragment)} launched at step {launched}"
        refusals = history.refusals[fragment]
        refusals.count(parity.refused_by, launched)
        if parity.refused_by:
            self._refuse(what, parity.refused_by, refusals)
        if parity.differing:
            self._mend(fragment, parity, what)

    def count_idle(self, transfer: Transfer, history: History) -> None:
        """Warn of clusters that took no inner step in a round; stop after too many such rounds.

        After `act_on`, which has agreed on whose they are; NonFiniteError on every rank alike.
        """
        idle, limit = history.idle[transfer.fragment], self._method.idle_rounds_allowed
        idle.count(transfer.buffers.parity.idle_in, transfer.launched - transfer.interval)
        skipped = transfer.launched - idle.since
        who = f"{_names(idle.because_of)} took none of the last {skipped} inner steps, since step"
        what = f"{self._adapter.stage.name_of(transfer.fragment)}: {who} {idle.since}"
        if limit and idle.in_a_row >= limit:
            raise NonFiniteError(
                f"{what}, and so has nothing to send, for {idle.in_a_row} rounds in a row "
                f"(clusters.max_idle_rounds allows less than {limit}): the optimizer skips a step "
                "whose gradients are not finite; resume from a checkpoint of before that step, "
                "with a lower learning rate or other data"
            )
        if idle.in_a_row == 1:
            logger.warning(
                "%s, and so sends nothing new: its optimizer skipped all of them, as it does where "
                "gradients are not finite%s", what,
                f"; all clusters stop after {limit} such rounds in a row" if limit else "",
            )  # fmt: skip

    def restarts(self, parity: ParityResult) -> bool:
        """Whether this cluster has lost its progress and goes on from the anchor."""
        return self._has_anchor and self._transport.seat.cluster_id in parity.refused_by

    def restart(self, under_way: Sequence[Transfer]) -> None:
        """Go on from the anchors: this cluster's progress is not finite, nor its next will be.

        What is kept of transfers under way is of the path that ends here: the new one starts with
        no progress of its own.
        """
        state = self._state
        for anchor, slots, fragment in zip(
            state.anchor, state.slots, self._adapter.fragments, strict=True
        ):
            self._method.delay.begin(anchor, slots.delay)
            for sizes in slots.staleness.values():
                sizes.nan_to_num_(0.0, 0.0, 0.0)  # of a first step that was not finite
            self._adapter.write(fragment.id, anchor)
        for transfer in under_way if self._method.delay.keeps == "local" else ():
            if transfer.buffers.kept is not None:
                transfer.buffers.kept.copy_(state.anchor[transfer.fragment])

    @property
    def _has_anchor(self) -> bool:
        return self._method.outer_optimizer.keeps_anchor

    def _refuse(self, what: str, refused_by: list[int], refusals: RoundsInARow) -> None:
        """Tell of a refusal; NonFiniteError where the cluster is not going to recover."""
        what = f"{what}: {_names(refused_by)} sent values that are not finite"
        if not self._has_anchor:
            raise NonFiniteError(
                f"{what}, and there is no anchor to go on from; resume from a checkpoint, with a "
                "lower learning rate or other data there"
            )
        if refusals.in_a_row >= MOST_REFUSALS + self._method.delay.rounds_under_way:
            raise NonFiniteError(
                f"{what}, and {refusals.in_a_row} rounds in a row have been left out: training has "
                f"diverged there; resume from a checkpoint of before step {refusals.since}, with a "
                "lower learning rate or other data"
            )
        logger.error("%s; all clusters leave this round out", what)

    def _mend(self, fragment: int, parity: ParityResult, what: str) -> None:
        first = self._transport.seat.ids[0]
        message = (
            f"{what}: {_names(parity.differing)} decoded another mean than cluster {first} in "
            f"round {parity.round}"
        )
        if self._method.on_mismatch == "stop":
            raise ParityError(f"{message} (on_mismatch is 'stop'); resume from a checkpoint")
        if not self._has_anchor:
            logger.error("%s; the next mean, or the exported one, brings them together", message)
            return
        logger.error("%s; taking cluster %d's outer state of the fragment", message, first)
        self._repair(fragment)

    def _repair(self, fragment: int) -> None:
        """Take the first member's outer state of a fragment, in fp32."""
        slots = self._state.slots[fragment]
        shared = [slots.staleness[name] for name in self._method.staleness.shared_slots]
        for tensor in (self._state.anchor[fragment], *slots.outer.values(), *shared):
            if tensor.numel():
                wire = tensor.to("cpu", copy=True)
                self._transport.broadcast(fragment, wire)
                tensor.copy_(wire)


def _names(clusters: list[int]) -> str:
    return ", ".join(f"cluster {m}" for m in clusters)
