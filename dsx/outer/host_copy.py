"""The copy of a contribution to the host: from the training thread to the transfer's, looked over.

The training thread only starts things. On an accelerator the copy to the host runs on a stream of
its own, into pinned memory, so the compute stream goes on at once; whether the values are finite
is seen on the host, by the transfer's thread, which waits for the copy before it encodes.

Codecs with state need to know that of all ranks of the cluster: whole matrices are made of several
ranks' shards, and a residual must not be spent in a round that is refused because of another rank.
Their collective, too, is only started here, where all ranks start collectives in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.on_device import on_device
from dsx.core.waits import waiting_for
from dsx.method.method import Method
from dsx.outer.arenas import TransferBuffers
from dsx.outer.whole_matrices import MatrixGather


class HostCopy:
    """One contribution under way to the host.

    Once it is there: `norm` (0-dim) of this rank's part, and `anchor`, the anchor's hash.
    """

    def __init__(
        self,
        buffers: TransferBuffers,
        copied: torch.cuda.Event | None,
        agreed: Callable[[], Tensor] | None,
        anchor: int | Tensor,
        device: torch.device,
    ) -> None:
        self.anchor = anchor
        self._device = device
        self.norm = torch.zeros(())
        self._buffers = buffers
        self._copied = copied
        self._agreed = agreed
        self._turn = Lock()
        self._is_finite: bool | None = None

    def is_finite(self) -> bool:
        """Wait for the values; whether they are finite.

        On the transfer's thread, but where a policy needs the codes before the mean: there first.
        """
        with self._turn:  # a checkpoint asks, too
            if self._is_finite is None:
                self._is_finite = self._look()
            return self._is_finite

    def _look(self) -> bool:
        if self._copied is not None:
            what = "the copy of a contribution to the host"
            with waiting_for(what, None), on_device(self._device):
                self._copied.synchronize()
        self.norm.copy_(torch.linalg.vector_norm(self._buffers.sent))
        if self._agreed is not None:
            return not bool(self._agreed())
        return bool(self.norm.isfinite()) and bool(self._buffers.posted.averages.isfinite().all())


class HostCopies:
    """Starts them, for one rank."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        matrix_gathers: Sequence[MatrixGather],
        device: torch.device,
    ) -> None:
        self._is_agreed = not method.compression.is_exact and adapter.ranks.shard[1] > 1
        self._adapter = adapter
        self._matrix_gathers = matrix_gathers
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(
        self,
        fragment: int,
        contribution: Tensor,
        sideband: Tensor,
        buffers: TransferBuffers,
        anchor: int | Tensor,
    ) -> HostCopy:
        """Start bringing a contribution and its sideband to the transfer's buffers on the host.

        The hash of the `anchor`, where it is one on an accelerator, goes the same way. On a host
        `contribution` is what is sent, there already.

        Collective over the cluster's ranks where a codec has state; where matrices are put
        together, too, on an accelerator. There `contribution` `[numel]` is as the masters lie, and
        must be memory of its own, not to be written again.
        """
        agreed: Callable[[], Tensor] | None = None
        if self._is_agreed:
            norm = torch.linalg.vector_norm(contribution)
            is_lost = ~(norm.isfinite() & sideband.isfinite().all())
            agreed = self._adapter.ranks.begin_max_over_ranks(is_lost.float().view(1))
        if self._stream is None:
            buffers.posted.averages.copy_(sideband)
            return HostCopy(buffers, None, agreed, anchor, self._device)
        gather = self._matrix_gathers[fragment]
        if gather.is_needed:
            staged = torch.empty(buffers.sent.numel(), device=self._device)
            gather.to_wire(contribution, staged, self._adapter.ranks.all_to_all)
            contribution = staged
        # the penalty writes the sideband's own memory again, one step later, on the compute stream
        moved = [(contribution, buffers.sent), (sideband.clone(), buffers.posted.averages)]
        if isinstance(anchor, Tensor):
            there = torch.empty((), dtype=anchor.dtype, pin_memory=True)
            moved.append((anchor, there))
            anchor = there
        return HostCopy(buffers, self._copy(moved), agreed, anchor, self._device)

    def _copy(self, moved: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Start copies to the host behind what the compute stream has been given so far."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in moved:
                target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        for source, _ in moved:
            if source.is_cuda:  # what is empty, as a sideband may be, is on the host
                source.record_stream(self._stream)  # not to be reused before
        return copied
