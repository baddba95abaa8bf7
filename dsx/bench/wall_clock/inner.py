"""Who takes the inner steps of `dsx bench wall-clock`: DeepSpeed's engine, by Muon and AdamW.

As in `dsx bench convergence`: matrices of layers by Muon, the rest (embedding, head, norms) by
AdamW at three times the rate. The rate is that of an update as large as AdamW's, 0.2 per element
(arXiv:2502.16982); an orthogonal matrix of n x n has 1/sqrt(n) per element.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsx.bench.wall_clock.job import Inner, TrainingJob, build_gpt

_DECAY, _BETAS = 0.1, (0.9, 0.95)
_ADAMW_SIZE = 0.2  # of an element of AdamW's updates, root mean square
_REST_RATE = 3.0  # beside Muon


class TimedInner:
    """DeepSpeed's engine, and the seconds in which it could not but compute."""

    def __init__(self, job: TrainingJob, initialize: Callable[..., tuple[Any, ...]]) -> None:
        model = build_gpt(job.shape, job.seed)
        optimizer = make_optimizer(model, job.inner, job.rate)
        self.engine: Any = initialize(model=model, optimizer=optimizer, config=job.config)[0]
        self.forward_seconds = 0.0

    def take_step(self, windows: Tensor) -> float:
        """Take one inner step on int64 `[batch, length + 1]`; return its loss."""
        began = time.perf_counter()
        loss = self.engine(windows[:, :-1], windows[:, 1:])
        self.forward_seconds += time.perf_counter() - began
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def read(self) -> dict[str, float]:
        """Return sums so far."""
        return {"forward_seconds": self.forward_seconds, "cpu_seconds": time.thread_time()}


def make_optimizer(model: nn.Module, inner: Inner, rate: float) -> torch.optim.Optimizer:
    """Return what DeepSpeed steps with; ImportError where this DeepSpeed has no Muon."""
    matrices, rest = divide(model)
    if inner == "adamw":
        return torch.optim.AdamW([*matrices, *rest], rate, _BETAS, weight_decay=_DECAY)
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    size = min(matrices[0].shape)
    muon = {
        "params": matrices, "use_muon": True, "lr": rate * _ADAMW_SIZE * math.sqrt(size),
        "momentum": 0.95, "weight_decay": _DECAY,
    }  # fmt: skip
    adam = {
        "params": rest, "use_muon": False, "lr": rate * _REST_RATE, "betas": _BETAS, "eps": 1e-8,
        "weight_decay": _DECAY,
    }  # fmt: skip
    return MuonWithAuxAdam([muon, adam], adam_optimizer=torch.optim.AdamW)


def divide(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of layers, and all other parameters."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = name.startswith("layers.") and parameter.ndim == 2
        (matrices if is_matrix else rest).append(parameter)
    return matrices, rest
