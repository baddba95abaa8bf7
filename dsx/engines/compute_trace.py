"""Spans of forward and backward, for a trace: from hooks on the module, whatever the engine is.

The forward is the module's own call. The backward runs from the first gradient of one of its
outputs to the end of the pass, of which autograd tells; a forward that runs again inside it
(activation checkpointing) is part of it. A step in which the module was not called (a script that
calls its parts) has one "compute" span, from the boundary before to the optimizer. Nothing here may
raise: these hooks run inside training.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as now
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsx.core.recorder import ComputeRecorder
from dsx.engines.backward_hooks import tensors_of


class ComputeWatch:
    """Records what the engine does between two boundaries."""

    def __init__(self, trace: ComputeRecorder) -> None:
        self._trace = trace
        self._seen = 0  # the last step with a forward
        self._step, self._stepping = 0, 0  # the optimizer's, and when it began
        self._passed = now()

    def follow(self, module: nn.Module) -> list[RemovableHandle]:
        """Record forward and backward of a module from now on; return the hooks, to be removed."""
        began: dict[str, int] = {}

        def before(module: nn.Module, inputs: Any) -> None:
            self._seen = self._trace.step
            if _is_in_a_backward():
                begin_backward()
            else:
                began.clear()  # of a backward that failed, too
                began["forward"] = now()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if _is_in_a_backward():
                return
            if "forward" in began:
                name = "forward" if module.training else "evaluation"
                self._trace.add(name, "forward", began["forward"])
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)

        def begin_backward(grad: Tensor | None = None) -> None:
            if "backward" not in began:
                began["backward"] = now()
                engine: Any = cast(Any, torch.autograd.Variable)._execution_engine
                engine.queue_callback(end_backward)

        def end_backward() -> None:
            since = began.pop("backward", None)
            if since is not None:
                self._trace.add("backward", "backward", since)

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def begin_step(self) -> None:
        """Note the time; the optimizer is about to step."""
        self._step = self._trace.step
        if self._seen < self._step:
            self._trace.add("compute", "compute", self._passed)
            self._seen = self._step
        self._stepping = now()

    def end_step(self) -> None:
        """Record the optimizer's step, with what dsx did inside."""
        self._passed = self._trace.add("optimizer step", "optimizer", self._stepping, self._step)

    def around_step(self, take_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an engine's step, recorded."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self.begin_step()
            result = take_step(*args, **kwargs)
            self.end_step()
            return result

        return step


def _is_in_a_backward() -> bool:
    """Whether autograd runs a pass on this thread, as it does where a forward is recomputed."""
    return cast(Any, torch)._C._current_graph_task_id() != -1
