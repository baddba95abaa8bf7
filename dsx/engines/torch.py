"""Plain PyTorch as the inner engine: any `torch.optim.Optimizer` over fp32 parameters.

The parameters are their own masters. The clock is the optimizer's public step hook, so a
`GradScaler` that skips a step must say so with `Handle.skip_inner_step`, or the clusters' clocks
drift apart.

A layerwise schedule with `when="after"` takes the optimizer's step layer by layer inside the
backward, so nothing a script does to gradients after `backward()` has any effect: no GradScaler,
no clipping of the global norm there (see schedule/layerwise.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dsx.core.recorder import ComputeRecorder
from dsx.core.types import BackwardTrigger, ParameterShape, Stage
from dsx.engines.backward_hooks import BackwardWatch
from dsx.engines.cluster_collectives import OneRank
from dsx.engines.compute_trace import ComputeWatch
from dsx.engines.masters import Masters, MastersAdapter, Piece
from dsx.method.fragments import Fragmenter


class TorchAdapter(MastersAdapter):
    """A module and its optimizer in one process; this rank owns every parameter whole."""

    buffer_bytes = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fragmenter: Fragmenter,
        backwards: int = 1,
        keeps_state_on_host: bool = False,
    ) -> None:
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = {n: p for n, p in model.named_parameters() if id(p) in optimized}
        if len(parameters) != len(optimized):
            raise ValueError(
                f"the optimizer holds {len(optimized)} parameters, {len(parameters)} of them in "
                "the model: attach the model that the optimizer trains"
            )
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}: the outer step needs fp32 masters; "
                    "keep the parameters in fp32 and use torch.autocast, or train with DeepSpeed"
                )
            if not parameter.is_contiguous():
                raise ValueError(f"parameter {name} is not contiguous; call .contiguous() on it")
        shapes = [ParameterShape(n, tuple(p.shape)) for n, p in parameters.items()]
        pieces = {n: Piece(p, tuple(p.shape)) for n, p in parameters.items()}
        assignment = fragmenter.assign(shapes)
        self._model = model
        self._optimizer = optimizer
        self._members = [[parameters[name] for name in names] for names in assignment]
        self._backwards = backwards
        self._watch: BackwardWatch | None = None
        self._is_stepping_fragment = False
        self.stage = Stage()
        self.ranks = OneRank()
        device = next(iter(parameters.values())).device
        self._hold(Masters(shapes, assignment, pieces), device, keeps_state_on_host)

    def sync_model_weights(self) -> None:
        """Nothing to do: the parameters are the masters."""

    def inner_lr(self) -> float:
        """Return the first parameter group's rate."""
        return float(self._optimizer.param_groups[0]["lr"])

    def on_inner_step(self, callback: Callable[[bool], object]) -> None:
        """Call back after every `optimizer.step()`, with whether it left the parameters alone.

        A fused optimizer is called by a `GradScaler` for a step to be skipped, too, and told so.
        """

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not self._is_stepping_fragment:
                found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
                callback(found_inf is not None and bool(found_inf.item()))
                self.end_inner_step()

        self._optimizer.register_step_post_hook(after_step)

    def trace_compute(self, trace: ComputeRecorder) -> None:
        """Record forward, backward and the optimizer's step."""
        watch = ComputeWatch(trace)
        watch.follow(self._model)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            watch.begin_step()

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            watch.end_step()

        self._optimizer.register_step_pre_hook(before_step)
        self._optimizer.register_step_post_hook(after_step)

    def end_inner_step(self) -> None:
        """Forget this step's gradients; to be called where `on_inner_step` is not used."""
        if self._watch is not None:
            self._watch.begin_step()

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Call back with a fragment inside the backward, stepped by then if `when="after"`."""

        if when == "after" and _needs_closure(self._optimizer):
            raise ValueError(
                f"schedule.when='after' steps each layer inside the backward, which "
                f"{type(self._optimizer).__name__} cannot do: its step() needs a closure; use "
                "schedule.when='before'"
            )

        def on_complete(fragment: int) -> None:
            if when == "after":
                self._step_fragment(fragment)
            callback(fragment)

        self._watch = BackwardWatch(self._model, self._members, self._backwards, on_complete)

    def backward_seconds(self, fragment: int) -> float | None:
        """Return the time between this fragment's gradients and those before them, last time."""
        return self._watch.seconds[fragment] if self._watch is not None else None

    def _step_fragment(self, fragment: int) -> None:
        """Take the optimizer's step for one fragment alone.

        Optimizers pass over parameters without a gradient: the others' are set aside meanwhile,
        and this fragment's are dropped, so that the step at the end passes over it in turn.
        """
        own = {id(p) for p in self._members[fragment]}
        others = [
            (p, p.grad)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if id(p) not in own
        ]
        for parameter, _ in others:
            parameter.grad = None
        self._is_stepping_fragment = True
        try:
            self._optimizer.step()
        finally:
            self._is_stepping_fragment = False
            for parameter, gradient in others:
                parameter.grad = gradient
        for parameter in self._members[fragment]:
            parameter.grad = None


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
