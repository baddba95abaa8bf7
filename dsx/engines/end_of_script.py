"""How a run whose script saves what it trains is told to end: by the script's own callback, or by
`TorchCheckpoints`.

Its step is complete where the script says so, by `should_stop()`; else where the next one begins,
behind whatever the script does at the end of a step. It may have taken the next batch from its
loader by then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsx.checkpoint.health import tensors_of
from dsx.checkpoint.tags import cluster_directory, complete_tag
from dsx.comm.world import World
from dsx.config.checkpoints import CheckpointsConfig, refuse_of_script
from dsx.engines.agreed_save import AgreedSave
from dsx.engines.cluster_collectives import gather_objects
from dsx.training.handle import Handle
from dsx.training.manifest import manifest_of


class EndOfScript:
    """Saves a tag in which the script's callback writes what is its own."""

    ends_elsewhere, saves_when_asked = False, True
    needs_callback = True  # the script alone knows how to save what is trained

    def __init__(self, handle: Handle, world: World) -> None:
        self._handle = handle
        self._world = world
        self.write_own: Callable[[Path], object] | None = None

    def serve(self, write_own: Callable[[Path], object]) -> None:
        """Let this write model and optimizers, on every rank of the cluster."""
        self.write_own, self.needs_callback = write_own, False

    def require_served(self, checkpoints: CheckpointsConfig) -> None:
        """Raise ConfigError for what is done to tags, where the script saves by itself."""
        if self.needs_callback:
            refuse_of_script(checkpoints)

    def save(self, base: Path, tag: str) -> Path:
        """Save the outer state beside what the callback writes; return the directory."""
        handle, world = self._handle, self._world
        directory = cluster_directory(base, world.cluster_id)
        saving = AgreedSave(handle, directory, tag, world.rank == 0)
        saving.of_script(lambda: self._ask_script(saving.unfinished))
        if (write_own := self.write_own) is not None:
            saving.do(lambda: write_own(saving.unfinished))
        saving.do(lambda: handle.write(saving.unfinished))
        adapter: Any = handle.loop.adapter
        judged = gather_objects(handle.rollback.judge(tensors_of(adapter.inner_optimizers)))
        manifest = manifest_of(handle, world, judged)
        saving.complete(lambda: complete_tag(directory, tag, manifest))
        return directory / tag

    def _ask_script(self, directory: Path) -> None:
        if self._handle.preemption.script_state(directory):
            raise ValueError(
                "on_preemption's callback has returned something, which only DeepSpeed's "
                "client_state takes: write it into the directory that it is given"
            )


def follow_steps(
    handle: Handle,
    world: World,
    before_step: Callable[[Callable[[], None]], object],
    checkpoints: CheckpointsConfig | None = None,
) -> None:
    """Let the run end where it is told to, and go on where a boundary was left.

    `before_step(f)` has to call f before each step, on all ranks alike. What of `checkpoints` a
    script that saves by itself has not is refused there.
    """
    preemption = handle.preemption
    preemption.engine = end = EndOfScript(handle, world)

    def begin_step() -> None:
        is_of_script = preemption.engine is end  # unless a library knows better
        if is_of_script and checkpoints is not None:
            end.require_served(checkpoints)
        preemption.begin_step()
        if is_of_script:
            preemption.end_if_due()
        handle.rollback.go_back_if_due()
        settle_before_backward(handle)

    before_step(begin_step)


def settle_before_backward(handle: Handle) -> None:
    """Take up what a resumed run had under way before anything is launched inside the backward.

    Collective over a stage's ranks, whose backwards need not come to their launches in one order.
    """
    if handle.method.schedule.when is not None:
        handle.loop.settle()


def before_forward(model: nn.Module) -> Callable[[Callable[[], None]], object]:
    """Return what has a function called before each forward."""

    def follow(function: Callable[[], None]) -> object:
        def first(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():  # validation may be one rank's alone
                function()

        hook: Any = torch.compiler.disable(first)  # of a model that is compiled in place
        return model.register_forward_pre_hook(hook, prepend=True)  # FSDP2 gathers in its own

    return follow


def before_zero_grad(optimizer: Any) -> Callable[[Callable[[], None]], object]:
    """Return what has a function called before gradients are zeroed, as steps of Megatron begin."""

    def hook(function: Callable[[], None]) -> None:
        zero_grad = optimizer.zero_grad

        def first(*args: Any, **kwargs: Any) -> Any:
            function()
            return zero_grad(*args, **kwargs)

        optimizer.zero_grad = first

    return hook
