"""Context parallelism on the CPU: Megatron's cut of the sequence, and an attention for it.

Of megatron-core only Transformer Engine's attention runs with a cut sequence, which needs a GPU;
its own refuses. `GatheredAttention` is a stand-in of ours for it: keys and values of all ranks are
gathered, as `cp_comm_type="all_gather"` does. The groups, the reduction of gradients over them, the
optimizers and the place of each rank in the data are Megatron's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Gather(torch.autograd.Function):
    """All ranks' parts along dimension 0; backward sums what all ranks give for each."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class GatheredAttention(nn.Module):
    """Causal attention `[tokens, batch, heads, width]` of this rank's tokens to those of all."""

    def __init__(self, config: Any, pg_collection: Any, **kwargs: Any) -> None:
        """As Megatron builds a layer's attention."""
        super().__init__()
        self._group = pg_collection.cp
        self._scale = 1 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `[tokens, batch, heads * width]` of this rank's queries."""
        count, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        places = [_places(query.shape[0], one, count) for one in range(count)]
        is_hidden = torch.cat(places)[None, :] > places[rank][:, None]
        keys, values = _Gather.apply(key, self._group), _Gather.apply(value, self._group)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, keys) * self._scale
        weights = scores.float().masked_fill(is_hidden, -10000.0).softmax(-1).to(values.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, values).flatten(2)


def _places(tokens: int, rank: int, count: int) -> Tensor:
    """Where a rank's tokens are in the sequence: one run from its front, one from its back."""
    half = tokens // 2
    runs = [rank, 2 * count - 1 - rank]
    return torch.cat([torch.arange(run * half, (run + 1) * half) for run in runs])


def with_gathered_attention(spec: Any) -> Any:
    """Return a specification, of a layer or of a stage's, with the stand-in as attention."""
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


def own_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what this rank takes of a batch `[rows, tokens]` of its group, as Megatron cuts."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    return get_batch_on_this_cp_rank(batch)
