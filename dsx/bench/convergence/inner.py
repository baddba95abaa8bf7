"""The inner optimizers of a study, and a step of them.

`adamw` steps all of a model; `muon` the matrices of its layers, and AdamW the rest: embeddings,
the head, vectors. Those may have a rate of their own, as a multiple of the matrices'. Muon's
updates are scaled to the size of AdamW's (Liu et al., arXiv:2502.16982), so one rate goes for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsx.bench.convergence.muon import Muon
from dsx.bench.convergence.task import Study

Batch = tuple[Tensor, Tensor]  # inputs, targets
_LAYERS = "layers."
_BETAS = (0.9, 0.95)


def make_optimizers(
    model: nn.Module, study: Study, slow: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Return what every run steps with; `slow` is the part of Muon's slow momentum."""
    matrices = [
        p for name, p in model.named_parameters() if name.startswith(_LAYERS) and p.ndim == 2
    ]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [{"params": matrices, "scale": 1.0}, {"params": rest, "scale": study.rest_rate}]
    first: list[torch.optim.Optimizer] = []
    if study.inner == "muon":
        momentum = study.muon_momentum
        first.append(Muon([groups.pop(0)], 1e-3, study.weight_decay, momentum, slow))
    held = [group for group in groups if group["params"]]
    return [*first, torch.optim.AdamW(held, betas=_BETAS, weight_decay=study.weight_decay)]


def take_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, lr: float
) -> None:
    """Take one inner step on inputs and targets, at a rate for matrices."""
    begin_step(model, optimizers, batch)
    end_step(model, optimizers, lr)


def begin_step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Batch) -> None:
    """Leave the gradients of a batch in the model."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(*batch).backward()


def end_step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Clip the gradients and step with them, at a rate for matrices."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
