"""What clusters may share in their inner steps beside a method, to tell what being apart costs.

No method of dsx: what is shared here is exposed, exact where its name does not say otherwise, and
counted as gradients in bf16 around a ring are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.bench.convergence.muon import SLOW
from dsx.compress.wire.formats import TwoBits

Optimizers = Sequence[torch.optim.Optimizer]
FIRST = ("momentum_buffer", "exp_avg")  # of Muon and of AdamW


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


@torch.no_grad()
def share_moments_coded(clusters: Sequence[Optimizers]) -> int:
    """Bring first moments together in 2 bit, both ways, as `recommended` does with weights.

    What a cluster's own code leaves out stays with it, so codes add up to nothing over clusters
    but the mean's own error. Returns as many elements of bf16 as that takes bytes.
    """
    wire, num_bytes = TwoBits(), 0
    for moments in zip(*(_kept(own, FIRST) for own in clusters), strict=True):
        numel = moments[0].numel()
        codec = wire.codec(numel, moments[0].device, "eager")
        message = torch.empty(wire.num_bytes(numel), dtype=torch.uint8, device=moments[0].device)

        def told(x: Tensor) -> Tensor:
            heard = torch.empty_like(x)
            codec.encode(x, message)  # noqa: B023
            codec.decode(message, heard)  # noqa: B023
            return heard

        sent = [told(moment.flatten()) for moment in moments]
        mean = told(torch.stack(sent).mean(0))
        for moment, own in zip(moments, sent, strict=True):
            moment.add_((mean - own).view_as(moment))
        num_bytes += wire.num_bytes(numel)
    return num_bytes // 2


def share_slow(clusters: Sequence[Optimizers]) -> int:
    """Average Muon's slow momentum; return the elements shared."""
    return _average([_kept(own, (SLOW,)) for own in clusters])


def shared_bytes(count: int, num_clusters: int) -> int:
    """Return what a cluster sends of so many elements: 2 bytes each, around a ring."""
    return 2 * 2 * (num_clusters - 1) * count // num_clusters


def _kept(own: Optimizers, names: Sequence[str]) -> list[Tensor]:
    """Return what one cluster's optimizers keep under these names, parameter by parameter."""
    return [
        optimizer.state[p][name]
        for optimizer in own
        for group in optimizer.param_groups
        for p in group["params"]
        for name in names
        if name in optimizer.state[p]
    ]


@torch.no_grad()
def _average(of_clusters: Sequence[Sequence[Tensor]]) -> int:
    count = 0
    for tensors in zip(*of_clusters, strict=True):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)
        count += mean.numel()
    return count
