"""The inner optimizers of a study, and a step of them.

`adamw` steps all of a model; `muon` the matrices of its layers, and AdamW the rest: embeddings,
the head, vectors. Those may have a rate of their own, as a multiple of the matrices'. Muon's
updates are scaled to the size of AdamW's (Liu et al., arXiv:2502.16982), so one rate goes for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsx.bench.convergence.task import Study

Batch = tuple[Tensor, Tensor]  # inputs, targets
_LAYERS = "layers."
_DECAY, _BETAS = 0.1, (0.9, 0.95)


def make_optimizers(model: nn.Module, study: Study) -> list[torch.optim.Optimizer]:
    """Return what every run steps with; RuntimeError where this torch has no Muon."""
    matrices = [
        p for name, p in model.named_parameters() if name.startswith(_LAYERS) and p.ndim == 2
    ]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [{"params": matrices, "scale": 1.0}, {"params": rest, "scale": study.rest_rate}]
    first: list[torch.optim.Optimizer] = []
    if study.inner == "muon":
        muon = getattr(torch.optim, "Muon", None)
        if muon is None:
            raise RuntimeError(
                f"--inner muon needs torch 2.9 or later, and this is {torch.__version__}; use "
                "--inner adamw"
            )
        rule: dict[str, Any] = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        first = [muon([groups.pop(0)], weight_decay=_DECAY, **rule)]
    held = [group for group in groups if group["params"]]
    return [*first, torch.optim.AdamW(held, betas=_BETAS, weight_decay=_DECAY)]


def take_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, lr: float
) -> None:
    """Take one inner step on inputs and targets, at a rate for matrices."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        optimizer.zero_grad()
    model(*batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
