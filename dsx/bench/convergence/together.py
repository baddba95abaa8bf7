"""What clusters may share in their inner steps beside a method, to tell what being apart costs.

No method of dsx: what is shared here is exact, exposed, and counted as gradients in bf16 around a
ring are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Optimizers = Sequence[torch.optim.Optimizer]


def share_rest(clusters: Sequence[Optimizers]) -> int:
    """Average the gradients of embeddings, heads and vectors; return the elements shared."""
    gradients = [
        [p.grad for p in own[-1].param_groups[-1]["params"] if p.grad is not None]
        for own in clusters
    ]
    return _average(gradients)


def share_all(clusters: Sequence[Optimizers]) -> int:
    """Average all gradients, as data parallel does; return the elements shared."""
    return _average(
        [
            [
                p.grad
                for optimizer in own
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            for own in clusters
        ]
    )


def share_moments(clusters: Sequence[Optimizers]) -> int:
    """Average what inner optimizers keep of each parameter; return the elements shared."""
    return _average(
        [
            [
                tensor
                for optimizer in own
                for group in optimizer.param_groups
                for p in group["params"]
                for tensor in optimizer.state[p].values()
                if isinstance(tensor, Tensor) and tensor.shape == p.shape
            ]
            for own in clusters
        ]
    )


def shared_bytes(count: int, num_clusters: int) -> int:
    """Return what a cluster sends of so many elements: 2 bytes each, around a ring."""
    return 2 * 2 * (num_clusters - 1) * count // num_clusters


@torch.no_grad()
def _average(of_clusters: Sequence[Sequence[Tensor]]) -> int:
    count = 0
    for tensors in zip(*of_clusters, strict=True):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)
        count += mean.numel()
    return count
