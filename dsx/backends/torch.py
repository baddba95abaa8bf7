"""Plain PyTorch as the inner engine: any `torch.optim.Optimizer` over fp32 parameters.

The parameters are their own masters. The clock is the optimizer's public step hook, so a
`GradScaler` that skips a step must say so with `Handle.skip_inner_step`, or the clusters' clocks
drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsx.backends.base import Masters, Piece
from dsx.fragment import Fragmenter
from dsx.types import ParameterShape


class TorchBackend:
    """A module and its optimizer in one process; this rank owns every parameter whole."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, fragmenter: Fragmenter
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
        self._masters = Masters(shapes, fragmenter.assign(shapes), pieces)
        self._optimizer = optimizer
        self.fragments = self._masters.fragments
        self.fragment_numel = self._masters.fragment_numel
        self.device = next(iter(parameters.values())).device

    def read(self, fragment: int, out: Tensor) -> None:
        """Copy the parameters of a fragment into `out`, in place."""
        self._masters.read(fragment, out)

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite the parameters of a fragment, in place."""
        self._masters.write(fragment, source)

    def publish(self) -> None:
        """Nothing to do: the parameters are the masters."""

    def inner_lr(self) -> float:
        """Return the first parameter group's rate."""
        return float(self._optimizer.param_groups[0]["lr"])

    def on_inner_step(self, callback: Callable[[], object]) -> None:
        """Call back after every `optimizer.step()`."""

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            callback()

        self._optimizer.register_step_post_hook(after_step)
