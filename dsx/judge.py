"""What is done about a transfer whose headers told of a NaN, or of a mean decoded differently."""

from __future__ import annotations

import logging

import torch

from dsx.backends.base import Backend
from dsx.comm.base import Transport
from dsx.method import Method
from dsx.state import StateStore
from dsx.transfer import Transfer

logger = logging.getLogger(__name__)


class ParityError(RuntimeError):
    """Clusters have applied different means, and the configuration says to stop."""


class Judge:
    """Acts on the verdicts of one rank's transfers, as every rank of every cluster does."""

    def __init__(
        self, method: Method, backend: Backend, transport: Transport, state: StateStore
    ) -> None:
        self._method = method
        self._backend = backend
        self._transport = transport
        self._state = state

    def judge(self, transfer: Transfer) -> None:
        """Agree in the cluster on a transfer's verdict, in place; repair or stop if means differ.

        Collective over the cluster's ranks: one may own nothing of the fragment, or see in its
        shard what the others do not.
        """
        verdict = transfer.berth.verdict
        flags = torch.zeros(3, self._transport.num_clusters)
        flags[0, verdict.refused_by] = 1
        flags[1, verdict.differing] = 1
        flags[2] = verdict.round
        flags = self._backend.max_over_ranks(flags)
        verdict.refused_by, verdict.differing = (
            [m for m, flag in enumerate(row) if flag] for row in flags[:2].tolist()
        )
        verdict.round = int(flags[2, 0])
        what = f"fragment {transfer.fragment} launched at step {transfer.launched}"
        if verdict.refused_by:
            logger.error(
                "%s: %s sent values that are not finite; all clusters leave this round out",
                what, _names(verdict.refused_by),
            )  # fmt: skip
        if verdict.differing:
            message = (
                f"{what}: {_names(verdict.differing)} decoded another mean than cluster 0 in round "
                f"{verdict.round}"
            )
            if self._method.on_mismatch == "stop":
                raise ParityError(f"{message} (on_mismatch is 'stop'); resume from a checkpoint")
            logger.error("%s; taking cluster 0's outer state of the fragment", message)
            self._repair(transfer.fragment)

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
