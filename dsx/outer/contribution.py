"""What a launch sends of the masters, made part by part: the delay policy's contribution."""

from __future__ import annotations

from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.method.in_one_pass import difference_
from dsx.method.method import Method
from dsx.outer.parts import Part
from dsx.outer.state import StateStore


class Contributions:
    """Makes those of one rank."""

    def __init__(self, method: Method, adapter: EngineAdapter, state: StateStore) -> None:
        self._method = method
        self._adapter = adapter
        self._state = state

    def make(self, fragment: int, part: Part, local: Tensor, kept: Tensor | None = None) -> Tensor:
        """Make the part of a launch's contribution in `local` `[part.numel]`, and return it.

        `kept` `[numel of the fragment]` is what the policy keeps of the launch until it is applied.
        """
        delay = self._method.delay
        keeps = None if kept is None else delay.keeps
        if keeps == "contribution" and self._method.encodes_at_launch:
            keeps = None  # what others decode is, once there are codes
        anchor, slots = self._state.anchor[fragment], self._state.slots[fragment].delay
        live = self._adapter.in_a_row(fragment, part.start, part.stop)
        if live is None or not delay.is_difference:
            self._adapter.read(fragment, local, part.start)
            live = local
        if kept is not None and keeps == "local":
            part.of(kept).copy_(live)
        if live is not local:
            difference_(delay.origin(part.of(anchor), part.of_each(slots)), live, local)
        else:
            sent = delay.contribution(local, part.of(anchor), part.of_each(slots))
            if sent is not local:
                local.copy_(sent)
        if kept is not None and keeps == "contribution":
            part.of(kept).copy_(local)
        return local
