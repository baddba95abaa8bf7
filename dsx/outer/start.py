"""How an outer loop begins: what all clusters train from, and what follows from it.

All take the masters of the first member; where a checkpoint follows, each keeps its own.
"""

from __future__ import annotations

import torch

from dsx.core.engine import EngineAdapter
from dsx.core.transport import Transport
from dsx.method.method import Method
from dsx.outer.state import StateStore


class Start:
    """Sets the masters of one rank, and its anchors and slots from them, before training."""

    def __init__(
        self, method: Method, adapter: EngineAdapter, transport: Transport, state: StateStore
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._transport = transport
        self._state = state

    @torch.no_grad()
    def take(self, keeps_masters: bool) -> None:
        """Take the first member's masters, or keep the own. Collective over all clusters."""
        for fragment in self._adapter.fragments:
            start = self._state.scratch(fragment.id, "local")
            self._adapter.read(fragment.id, start)
            if fragment.numel and not keeps_masters:
                wire = start.to("cpu", copy=True)
                self._transport.broadcast(fragment.id, wire)
                start.copy_(wire)
                self._adapter.write(fragment.id, start)
            slots = self._state.slots[fragment.id]
            if self._method.outer_optimizer.keeps_anchor:
                self._state.anchor[fragment.id].copy_(start)
            self._method.delay.begin(start, slots.delay)
            if "start" in slots.staleness:
                slots.staleness["start"].copy_(start)
        self._adapter.sync_model_weights()
