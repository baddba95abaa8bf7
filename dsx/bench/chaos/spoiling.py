"""What a cluster contributes is made wrong on purpose: its masters are, while a launch reads them.

As bits that flip would, in whatever engine. Nothing stays wrong in the cluster itself: the masters
are put back before anything else is done with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SPOILING: Mapping[str, float] = {"not_finite": float("nan"), "too_large": 1e6}


@contextlib.contextmanager
def spoilt(masters: Sequence[Tensor], factor: float) -> Generator[None]:
    """Let these be wrong by a factor meanwhile, in place; they have the bits of before then."""
    with torch.no_grad():
        kept = [master.detach().clone() for master in masters]
        for master in masters:
            master.mul_(factor)
        try:
            yield
        finally:
            for master, before in zip(masters, kept, strict=True):
                master.copy_(before)


class Spoiler:
    """Stands before a loop's launches; while `factor` is set, what they read is wrong by that."""

    factor: float | None = None

    def __init__(self, loop: Any, masters: Callable[[], Sequence[Tensor]]) -> None:
        """`loop` is dsx's own, of a handle; `masters` are the engine's tensors that it reads."""
        launch_due = loop.launch_due

        def launch(is_skipped: bool = False) -> None:
            if self.factor is None:
                launch_due(is_skipped)
                return
            with spoilt(masters(), self.factor):
                launch_due(is_skipped)
                loop.launches.make_due()  # else that is made as means are applied

        loop.launch_due = launch
