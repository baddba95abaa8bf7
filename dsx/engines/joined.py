"""Where an engine's cluster joins a run that goes on: when it heals, and what is not served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsx.comm.world import World
from dsx.training.handle import Handle


def heal_before_forward(module: torch.nn.Module, handle: Handle) -> None:
    """Have a cluster that joins come to where the others are before the model is used first."""
    if not handle.joining.is_due:
        return

    def heal(*arguments: Any) -> None:
        hook.remove()
        handle.settle()

    hook = module.register_forward_pre_hook(heal, prepend=True)


def expect_joined(handle: Handle, before_step: Callable[[Callable[[], None]], object]) -> None:
    """Raise RuntimeError in the first step of a loop that has not come to where the others are.

    Of an engine whose loop counts by itself, and whose ranks do not come to the model at one time.
    `before_step(f)` has to call f before each step.
    """

    def check() -> None:
        if handle.joining.is_due:
            raise RuntimeError(
                "a run goes on, which this cluster joins: call optimizer.dsx.settle() before the "
                "training loop, and begin it at optimizer.dsx.step, which is that of the others"
            )

    before_step(check)


def refuse_joining(world: World, what: str) -> None:
    """Raise ValueError if this cluster would join a run that goes on, with what cannot."""
    if world.joins is not None:
        raise ValueError(
            f"a run goes on, which cluster {world.cluster_id} would join: that is not served with "
            f"{what}; end the others (dsx ctl stop: all save), and start all clusters again"
        )
