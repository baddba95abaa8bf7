"""Where a round started and how far its first inner step went, for staleness penalties."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.core.engine import EngineAdapter
from dsx.core.types import History
from dsx.method.method import Method
from dsx.outer.per_tensor import ShardedTensors
from dsx.outer.state import StateStore


class FirstSteps:
    """What the penalty sees of inner steps; does nothing where the method has none."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        state: StateStore,
        per_tensor: Sequence[ShardedTensors],
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._state = state
        self._per_tensor = per_tensor

    def observe(self, history: History) -> None:
        """Measure how far the first inner step of a round has gone."""
        if not self._method.staleness.is_active:
            return
        for p, launched in enumerate(history.launched):
            if launched == history.step - 1:
                slots = self._state.slots[p].staleness
                displacement = self._state.whole(p, "work")
                self._adapter.read(p, displacement)
                displacement.sub_(slots.get("start", self._state.anchor[p]))
                self._method.staleness.observe(displacement, slots, self._per_tensor[p])

    def keep(self, history: History) -> None:
        """Keep where a round starts, for fragments launched at this boundary."""
        if not self._method.keeps_round_start:
            return
        for p, launched in enumerate(history.launched):
            if launched == history.step:
                self._adapter.read(p, self._state.slots[p].staleness["start"])
