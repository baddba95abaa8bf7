"""Norms of single tensors inside a flat fragment, to the same bits on every cluster.

Per-tensor norms decide how an anchor moves (staleness penalty, clip) and which fragment is sent
next, so they must not differ by a bit between clusters of different hardware. A library's sum
does: its order depends on the number of threads and the width of the vector unit. Here squares
are folded in halves, with elementwise multiplications and additions only, whose results IEEE 754
fixes; shards are then added in rank order by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.types import Fragment, ParameterShape


def sum_of_squares(x: Tensor, scratch: Tensor) -> Tensor:
    """Return the 0-dim sum of squares of `x` `[numel]`, folded in halves in `scratch` `[numel]`."""
    numel = x.numel()
    if not numel:
        return torch.zeros((), device=x.device)
    folded = torch.mul(x, x, out=scratch[:numel])
    while numel > 1:
        half = (numel + 1) // 2  # of an odd count, the middle element waits for the next fold
        folded[: numel - half].add_(folded[half:numel])
        numel = half
    return folded[0].clone()


class ShardedTensors:
    """One fragment's parameters, of which this rank owns pieces (`PerTensor` of types.py)."""

    def __init__(
        self,
        fragment: Fragment,
        parameters: Sequence[ParameterShape],
        sum_over_shards: Callable[[Tensor], Tensor],
        scratch: Callable[[], Tensor],
        device: torch.device,
    ) -> None:
        index = {p.name: i for i, p in enumerate(parameters)}
        self._pieces = [(index[s.name], s.offset, s.offset + s.numel) for s in fragment.layout]
        self._numel = torch.tensor([float(p.numel) for p in parameters], device=device)
        self._sum_over_shards = sum_over_shards
        self._scratch = scratch

    def norms(self, x: Tensor) -> Tensor:
        """Return the L2 norm of every tensor, fp32 `[num_tensors]`; collective in the cluster."""
        return self._squares(x).sqrt_()

    def rms(self, x: Tensor) -> Tensor:
        """Return the root mean square of every tensor; collective in the cluster."""
        return self._squares(x).div_(self._numel).sqrt_()

    def spread(self, factors: Tensor, out: Tensor) -> Tensor:
        """Write `factors[i]` to every element of tensor i in `out` `[numel]`, in place."""
        for index, start, stop in self._pieces:
            out[start:stop].copy_(factors[index])
        return out

    def _squares(self, x: Tensor) -> Tensor:
        squares = torch.zeros_like(self._numel)
        scratch = self._scratch()
        for index, start, stop in self._pieces:
            squares[index] += sum_of_squares(x[start:stop], scratch)
        return self._sum_over_shards(squares)


def sharded_tensors(
    adapter: EngineAdapter, scratch: Callable[[str, int], Tensor]
) -> list[ShardedTensors]:
    """Return those of every fragment; `scratch(purpose, numel)` gives a vector."""
    return [
        ShardedTensors(
            fragment,
            parameters,
            adapter.ranks.sum_over_shards,
            lambda numel=fragment.numel: scratch("fold", numel),
            adapter.device,
        )
        for fragment, parameters in zip(adapter.fragments, adapter.fragment_parameters, strict=True)
    ]
