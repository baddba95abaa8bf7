"""What is said of a checkpoint beside its files: who trained, and whether to go on from it."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.checkpoint.files import FORMAT
from dsx.checkpoint.tags import Manifest
from dsx.comm.world import World
from dsx.training.handle import Handle


def manifest_of(
    handle: Handle,
    world: World,
    judged: Sequence[tuple[str, bool]],
    is_preempted: bool | None = None,
) -> Manifest:
    """Return what is to be said of a checkpoint of this step, as each rank has `judged` it.

    Of what is wrong with it and whether it is doubtful. `is_preempted` is known here where an
    engine saves because the run is told to end.
    """
    farewells = handle.loop.transport.farewells
    gone = {*handle.preemption.waiting.gone, *(() if farewells is None else farewells.gone)}
    members = tuple(m for m in handle.members if m not in gone)
    return Manifest(
        FORMAT,
        handle.step,
        world.session,
        world.num_clusters,
        world.world_size,
        handle.is_finished,
        next((why for why, _ in judged if why), ""),
        handle.preemption.is_saving if is_preempted is None else is_preempted,
        any(doubt for _, doubt in judged),
        members if len(members) < world.num_clusters else (),
    )
