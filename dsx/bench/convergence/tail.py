"""The mean of a run's last models, one of each period in the last twentieth of the steps.

Averages of last anchors cost no bytes: every cluster has them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsx.bench.convergence.task import Study

_SHARE = 20  # of the steps, one part is averaged over


class TailMean:
    """Sums the mean of the clusters' parameters at the ends of the last periods."""

    def __init__(self, study: Study) -> None:
        self._first = study.num_steps - study.num_steps // _SHARE
        self._interval, self._last = study.interval, study.num_steps
        self._sums: list[Tensor] = []
        self._count = 0

    @torch.no_grad()
    def note(self, step: int, models: Sequence[nn.Module]) -> None:
        """Take the models in after a step, if it ends one of the last periods, or the run."""
        if step < self._first or (step % self._interval and step != self._last):
            return
        means = [
            torch.stack(own).mean(0) for own in zip(*(m.parameters() for m in models), strict=True)
        ]
        self._sums = (
            [a + b for a, b in zip(self._sums, means, strict=True)] if self._sums else means
        )
        self._count += 1

    @torch.no_grad()
    def model(self, like: nn.Module) -> nn.Module:
        """Return a copy of a model with the mean."""
        copied = copy.deepcopy(like)
        for parameter, total in zip(copied.parameters(), self._sums, strict=True):
            parameter.copy_(total / self._count)
        return copied
