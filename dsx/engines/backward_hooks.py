"""Know when a fragment's gradients are complete inside the backward, and how long that took.

A parameter's hook fires each time its gradient has been accumulated: once per backward pass that
reaches it, so with micro-batches only the last pass counts. Parameters that a pass does not reach
leave their fragment incomplete; it is then launched at the step boundary instead. Which parameters
are trained is looked at in every step: a script may freeze and unfreeze layers as it goes.

What an engine makes of the gradients is none of this file's business: where parameters are sent as
they rest during the backward, they need not be reduced when a hook fires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsx.engines.backward_clock import EventClock, HostClock, Laps


class BackwardWatch:
    """Counts the accumulated gradients of an inner step, per fragment.

    `seconds[fragment]` runs from the completion of the fragment before, or from the module's
    output; a fragment without trained parameters takes none. None: not known so far. `hooks`
    are there to be removed. `modules` are those whose outputs a pass begins at; `backwards()` is
    the number of passes in this step. `allows_more`: further gradients of a fragment that is
    complete are no mistake (an engine's checkpointing may give a shared parameter several a pass).
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[Sequence[nn.Parameter]],
        backwards: Callable[[], int],
        on_complete: Callable[[int], None],
        allows_more: bool = False,
    ) -> None:
        self._parameters = parameters
        self._backwards = backwards
        self._allows_more = allows_more
        self._expected: list[int] = []  # gradients of this inner step, once its first has come
        self._seen = [0] * len(parameters)
        self._on_complete = on_complete
        self._has_begun = False
        self._laps = Laps(len(parameters), _clock_of(parameters))
        self.hooks = [module.register_forward_hook(self._watch_output) for module in modules]
        for fragment, members in enumerate(parameters):
            for parameter in members:
                self.hooks.append(_watch_gradient(parameter, self._make_hook(fragment)))

    @property
    def seconds(self) -> Sequence[float | None]:
        """What each fragment's backward took last; on an accelerator as of the last boundary."""
        return self._laps.seconds

    def begin_step(self) -> None:
        """Start counting for the next inner step."""
        self._expected = []
        self._seen = [0] * len(self._seen)
        self._has_begun = False
        self._laps.read()

    def _begin_gradients(self) -> None:
        """Count what is to come, and pass on the fragments that there is nothing to wait for."""
        trained = [sum(p.requires_grad for p in members) for members in self._parameters]
        backwards = self._backwards()
        self._expected = [count * backwards for count in trained]
        for fragment, count in enumerate(trained):
            if not count:
                self._laps.skip(fragment)
                self._on_complete(fragment)

    def _watch_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_pass)

    def _begin_pass(self, grad: Tensor | None = None) -> None:
        self._has_begun = True
        self._laps.begin()

    def _make_hook(self, fragment: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._has_begun:  # a module whose output is no tensor, or not this one's own
                self._begin_pass()
            if not self._expected:
                self._begin_gradients()
            self._seen[fragment] += 1
            if self._seen[fragment] > self._expected[fragment] and not self._allows_more:
                raise RuntimeError(
                    f"fragment {fragment} got more gradients in one inner step than "
                    f"schedule.backwards={self._backwards()} backward passes give: it has been "
                    "launched already; set schedule.backwards to the micro-batches per step"
                )
            if self._seen[fragment] == self._expected[fragment]:
                self._laps.end(fragment)
                self._on_complete(fragment)
                self._laps.begin()

        return hook


def _clock_of(parameters: Sequence[Sequence[nn.Parameter]]) -> HostClock | EventClock:
    """Return the clock of where the backward runs."""
    is_on_cuda = any(p.is_cuda for members in parameters for p in members)
    return EventClock() if is_on_cuda else HostClock()


def _watch_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call the hook whenever a gradient has been accumulated, of one that is frozen so far, too."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook on another, but keeps it on this one
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trained)
    return handle


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in cast(Mapping[Any, Any], output).values():
            yield from tensors_of(value)
    elif isinstance(output, (tuple, list)):
        for value in cast(Sequence[Any], output):
            yield from tensors_of(value)
