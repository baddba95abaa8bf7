"""From where a framework's model is attached to its first step the weights have to stay.

The outer state began from them.

What a script loads in between would be taken for what training has changed, and the outer step
would go beyond it. Its first step is an error then, before it changes anything.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from dsx.core.engine import EngineAdapter
from dsx.outer.digest import Digests
from dsx.run.session import RouteNotTaken
from dsx.training.handle import Handle


@contextmanager
def taking_no_step(*handles: Handle) -> Generator[None, None, None]:
    """Save or load what optimizers keep: torch steps those that have kept nothing yet."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle.loop.adapter.ignoring_steps())
        yield


class FirstStep:
    """Compares this rank's masters with those of now where the first optimizer steps, once."""

    def __init__(
        self, adapter: EngineAdapter, optimizers: Iterable[Optimizer], begin: str, fix: str
    ) -> None:
        """`begin` is the call behind which nothing may change, and `fix` what to do instead."""
        self._adapter, self._begin, self._fix = adapter, begin, fix
        self._expected: list[Any] | None = self._digests()
        compare: Any = torch.compiler.disable(self._compare)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(compare)

    def release(self) -> None:
        """Compare nothing: a state has been loaded, with the outer state that belongs to it."""
        self._expected = None

    def _compare(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._adapter.ignores_steps:
            return
        expected, self._expected = self._expected, None
        if expected is None or expected == self._digests():
            return
        raise RouteNotTaken(
            f"the model's weights were changed between {self._begin} and the first step, and "
            f"dsx.run has begun from those that were there: {self._fix}"
        )

    @torch.no_grad()
    def _digests(self) -> list[Any]:
        found: list[Any] = []
        with Digests() as digests:
            for fragment in self._adapter.fragments:
                masters = torch.empty(fragment.numel)
                self._adapter.read(fragment.id, masters)
                found.append(digests.of(masters).tolist())
        return found
