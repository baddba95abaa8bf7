"""How a run whose script saves what it trains is told to end: by the script's own callback.

Its step is complete where the script says so, by `should_stop()`; else where the model is called
next, behind whatever the script does at the end of a step. The script may have taken the next batch
from its loader by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from dsx.checkpoint.files import FORMAT
from dsx.checkpoint.health import find_trouble, tensors_of
from dsx.checkpoint.tags import Manifest, begin_tag, cluster_directory, complete_tag
from dsx.comm.world import World
from dsx.engines.cluster_collectives import from_first, gather_objects, meet_in_cluster
from dsx.training.handle import Handle


class EndOfScript:
    """Saves a tag in which the script's callback writes what is its own."""

    needs_callback = True

    def __init__(self, handle: Handle, world: World) -> None:
        self._handle = handle
        self._world = world

    def save(self, base: Path, tag: str) -> Path:
        """Save the outer state beside what the callback writes; return the directory."""
        handle, world = self._handle, self._world
        directory = cluster_directory(base, world.cluster_id)
        begun: str = from_first(begin_tag(directory, tag) if world.rank == 0 else None)
        if handle.preemption.script_state(directory / begun):
            raise ValueError(
                "on_preemption's callback has returned something, which only DeepSpeed's "
                "client_state takes: write it into the directory that it is given"
            )
        handle.save(directory / begun)
        adapter: Any = handle.loop.adapter
        troubles = gather_objects(find_trouble(handle.loop, tensors_of(adapter.inner_optimizers)))
        if world.rank == 0:
            manifest = Manifest(
                FORMAT, handle.step, world.session, world.num_clusters, world.world_size,
                False, next(filter(None, troubles), ""), True,
            )  # fmt: skip
            complete_tag(directory, tag, manifest)
        meet_in_cluster(f"complete {tag}")
        handle.saved(directory / tag)
        return directory / tag


def end_when_told(model: nn.Module, handle: Handle, world: World) -> None:
    """Let the run save and end before the model is called again, where it is told to."""
    preemption = handle.preemption
    preemption.engine = end = EndOfScript(handle, world)

    def before_forward(module: nn.Module, args: Any) -> None:
        if preemption.engine is end:  # unless somebody knows better
            preemption.end_if_due()
        handle.rollback.go_back_if_due()

    model.register_forward_pre_hook(before_forward)
