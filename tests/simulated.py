"""C clusters in one process around copies of one module."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsx.engines.simulated import SimulatedClusters
from dsx.method.method import Method


class Simulated(SimulatedClusters):
    """Every cluster starts from a copy of `model`."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        method: Method,
        num_clusters: int,
    ) -> None:
        models = [copy.deepcopy(model) for _ in range(num_clusters)]
        super().__init__(models, [make_optimizer(m) for m in models], method)

    def parameters(self) -> list[dict[str, Tensor]]:
        """Copies of every cluster's parameters by name."""
        return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in self.models]
