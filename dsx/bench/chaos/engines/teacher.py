"""A small net that learns what a teacher of its shape says, from samples made of their numbers.

What the teacher says is noisy, so that the loss ends above zero, as that of a language model does:
losses are compared as ratios, and those of numbers near zero tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DEPTH, ROWS = 32, 4, 8
NUM_SAMPLES = 1 << 20  # of which no run reads all
RATE = 2e-3
NOISE = 0.15  # of targets: 0.0225 of a loss that begins with 0.055 to 0.08
_EVALUATED = range(10_000_000, 10_000_064)  # samples that nobody trains on


class Net(nn.Sequential):
    """A few layers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        super().__init__(*layers[:-1])


class Numbers:
    """A data set of numbers, int64 [1] each, which samples are made of."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int, /) -> Tensor:
        return torch.tensor([index])


class Teacher:
    """What is to be learnt, the same in every process of a seed."""

    def __init__(self, seed: int) -> None:
        self._net = Net(seed + 1)

    def batch_of(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each [len(samples) * ROWS, WIDTH]."""
        made = torch.stack(
            [
                torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(n))
                for n in samples
            ]
        )
        inputs, noise = (part.flatten(0, 1) for part in made.unbind(1))
        with torch.no_grad():
            return inputs, self._net(inputs) + NOISE * noise

    def loss_of(self, net: nn.Module) -> float:
        """Return the mean squared error of samples that nobody trains on."""
        inputs, targets = self.batch_of(_EVALUATED)
        with torch.no_grad():
            return F.mse_loss(net(inputs), targets).item()
