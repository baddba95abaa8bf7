"""C clusters in one process around ordinary modules and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsx.backends.torch import TorchBackend
from dsx.comm.in_process import InProcessHub, step_together
from dsx.method import Method
from dsx.outer_loop import OuterLoop


class Simulated:
    """The clusters' models, optimizers and loops; `step` passes one inner step of all."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        method: Method,
        num_clusters: int,
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(num_clusters)]
        self.optimizers = [make_optimizer(m) for m in self.models]
        self.loops = [
            OuterLoop(method, TorchBackend(m, o, method.fragments), transport)
            for m, o, transport in zip(
                self.models, self.optimizers, InProcessHub(num_clusters).transports(), strict=True
            )
        ]
        for loop in self.loops:
            loop.start()
        self.now = 0

    def step(self, compute_loss: Callable[[nn.Module, int, int], Tensor]) -> None:
        """One inner step of every cluster and the boundary behind it."""
        self.now += 1
        for cluster, (model, optimizer) in enumerate(
            zip(self.models, self.optimizers, strict=True)
        ):
            optimizer.zero_grad()
            compute_loss(model, cluster, self.now).backward()
            optimizer.step()
        step_together(self.loops)

    def parameters(self) -> list[dict[str, Tensor]]:
        """Copies of every cluster's parameters by name."""
        return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in self.models]
