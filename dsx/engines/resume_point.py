"""Which checkpoint all clusters load: the one that is named, else the newest good one.

Every rank looks over a share of the files of its cluster's tag, and all clusters agree, before
anything is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import find_damage
from dsx.checkpoint.choice import Candidate, newest_good
from dsx.checkpoint.tags import cluster_directory, common_tag, tags_of, tags_within_reach
from dsx.comm.world import World
from dsx.engines.cluster_collectives import gather_objects

Gather = Callable[[Any], list[Any]]  # one value per cluster, on every rank
logger = logging.getLogger(__name__)


def choose(
    gather: Gather,
    world: World,
    base: str | Path,
    wanted: str | None,
    before: int | None = None,
    also: Callable[[str], str | None] = lambda tag: None,
) -> tuple[int, str]:
    """Return the cluster whose tag this one loads, and the tag. Collective over all clusters.

    `gather` gives one value per cluster. With `before`, what is of that step or later is passed
    over; `also` says of this cluster's tag what else is wrong. ValueError, in all clusters, for a
    `wanted` tag that is damaged.
    """
    wanted = None if wanted is None else str(wanted)  # a number, in scripts
    found = gather(tags_within_reach(base, world.cluster_id))
    if wanted is None:
        examine = partial(_examine, gather, world, base, also)
        chosen = newest_good(found, base, examine, world.rank == 0, before)
        return chosen.sources[world.cluster_id]
    sources = common_tag(found, base, wanted)
    told = _examine(gather, world, base, also, Candidate(wanted, 0, tuple(sources)))
    for cluster, why in enumerate(told):
        if why:
            raise ValueError(f"cluster {cluster}: {why}; {_others(found, wanted)}")
    source, tag = sources[world.cluster_id]
    own = world.cluster_id
    trouble = tags_of(found[own], own, source)[tag].get("trouble")
    if trouble and world.rank == 0:
        logger.warning("checkpoint %s is loaded as it was named, although %s", wanted, trouble)
    return source, tag


def _examine(
    gather: Gather,
    world: World,
    base: str | Path,
    also: Callable[[str], str | None],
    candidate: Candidate,
) -> list[str | None]:
    """Return by cluster what one of its ranks finds wrong with the files of a tag."""
    source, name = candidate.sources[world.cluster_id]
    directory = cluster_directory(base, source) / name
    own = also(name) or find_damage(directory, world.rank, world.world_size)
    ours = gather_objects(own)
    return gather(next((trouble for trouble in ours if trouble), None))


def _others(found: list[list[dict[str, Any]]], wanted: str) -> str:
    there = sorted({tag for own, _ in found for tag in own} - {wanted})
    return (
        f"load an earlier checkpoint, in all clusters (there: {', '.join(there) or 'none'}), leave "
        "tag=... out (the newest good one is taken), or bring an intact copy"
    )
