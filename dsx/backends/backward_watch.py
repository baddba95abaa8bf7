"""Know when a fragment's gradients are complete inside the backward, and how long that took.

A parameter's hook fires each time its gradient has been accumulated: once per backward pass that
reaches it, so with micro-batches only the last pass counts. Parameters that a pass does not reach
leave their fragment incomplete; it is then launched at the step boundary instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn


class BackwardWatch:
    """Counts the accumulated gradients of an inner step, per fragment."""

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        backwards: int,
        on_complete: Callable[[int], None],
    ) -> None:
        trained = [[p for p in members if p.requires_grad] for members in parameters]
        self._expected = [len(members) * backwards for members in trained]
        self._seen = [0] * len(parameters)
        self._on_complete = on_complete
        self._began = 0.0
        self._gradients = 0
        self._per_pass = sum(len(members) for members in trained)
        self.seconds: list[float | None] = [None] * len(parameters)
        for fragment, members in enumerate(trained):
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(self._make_hook(fragment))

    def begin_step(self) -> None:
        """Start counting for the next inner step."""
        self._seen = [0] * len(self._seen)
        self._gradients = 0

    def _make_hook(self, fragment: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            now = time.perf_counter()
            if self._gradients % self._per_pass == 0:
                self._began = now  # the first gradient of a pass: the last layer's own start
            self._gradients += 1
            self._seen[fragment] += 1
            if self._seen[fragment] == self._expected[fragment]:
                self.seconds[fragment] = now - self._began
                self._on_complete(fragment)
                self._began = time.perf_counter()

        return hook
