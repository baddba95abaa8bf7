"""The newest iteration that all clusters can go on from: dsx's outer state and Megatron's part.

With a remote place (`checkpoints.remote`) what a cluster lacks on its disk is fetched, both parts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dsx.checkpoint.remote import open_remote
from dsx.comm.world import World
from dsx.config.checkpoints import CheckpointsConfig
from dsx.engines.megatron.own_part import MegatronPart, iteration_of, latest_iteration
from dsx.engines.resume_point import choose


def newest_iteration(
    world: World, checkpoints: CheckpointsConfig, directory: str | Path, own_part: str | Path
) -> int | None:
    """Return the newest good iteration of all clusters; None where nothing is to be chosen.

    `directory` is what `save_outer_state` was given, `own_part` where Megatron's checkpoints and
    their tracker file are. Before Megatron loads. Collective over all ranks of all clusters.
    ValueError if outer state is there, and none of it is good.
    """
    gather = partial(world.rendezvous.gather, "resume point")
    part, remote = MegatronPart(own_part), open_remote(checkpoints)
    everyone = gather((latest_iteration(Path(own_part)), remote is not None))
    if any(iteration is None and not is_remote for iteration, is_remote in everyone):
        return None  # what does not fit is told when it is loaded
    if remote is not None:
        remote.part = part

    def has_megatrons(tag: str) -> str | None:
        if iteration_of(tag) is not None and part.is_complete(tag):
            return None
        return f"{own_part} has no complete checkpoint of Megatron's {tag}"

    base = Path(directory) / "dsx"
    try:
        _, tag = choose(gather, world, base, None, also=has_megatrons, remote=remote)
    except FileNotFoundError:
        return None  # no outer state: told with what to do where it is loaded
    return iteration_of(tag)
