"""A boundary that is left before what is due has been applied, because a checkpoint cannot wait.

A run that is told to end within seconds does not wait for a slow line. What was due stays under
way, the checkpoint says that the boundary is not over, and whoever loads it ends the boundary
before the next inner step: with the inner rate of then, so with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsx.core.engine import EngineAdapter


class Deferral:
    """Whether the boundary passed last has been left, and the inner rate as it was there."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self.inner_lr: float | None = None  # of a boundary that has been left

    @property
    def is_deferred(self) -> bool:
        """Whether something is still to be applied before the next inner step."""
        return self.inner_lr is not None

    def puts_off(self, is_there: bool) -> bool:
        """Whether a transfer is put off: it is not there for a rank. Collective in the stage."""
        missing = torch.tensor([float(not is_there)])
        return bool(self._adapter.ranks.max_over_ranks(missing))

    def begin(self, send_due: Callable[[], object]) -> None:
        """Take the boundary as left; `send_due` sends what its launches have not: the others may
        come to have it, whoever goes on from here.
        """
        send_due()
        if self.inner_lr is None:
            self.inner_lr = self._adapter.inner_lr()

    def end(self) -> None:
        """Take the boundary as ended."""
        self.inner_lr = None

    def require_none(self, step: int) -> None:
        """Raise RuntimeError if the boundary of this step has been left."""
        if self.is_deferred:
            raise RuntimeError(
                f"step {step} was left before what was due had been applied, for a checkpoint: "
                "end_boundary() applies it, and has to come before the next inner step"
            )
