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
from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import cluster_directory, common_tag, tags_of, tags_within_reach
from dsx.comm.world import World
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.fetching import Fetching

Gather = Callable[[Any], list[Any]]  # one value per cluster, on every rank
logger = logging.getLogger(__name__)


def choose(
    gather: Gather,
    world: World,
    base: str | Path,
    wanted: str | None,
    before: int | None = None,
    also: Callable[[str], str | None] = lambda tag: None,
    remote: Remote | None = None,
) -> tuple[int, str]:
    """Return the cluster whose tag this one loads, and the tag. Collective over all clusters.

    `gather` gives one value per cluster. With `before`, what is of that step or later is passed
    over; `also` says of this cluster's tag what else is wrong. What a cluster lacks, and `remote`
    has, is fetched. ValueError, in all clusters, for a `wanted` tag that is damaged, and where
    there is none and a remote place could not be read.
    """
    wanted = None if wanted is None else str(wanted)  # a number, in scripts
    fetching = Fetching(remote, world, Path(base))
    found = gather(fetching.within_reach(tags_within_reach(base, world.cluster_id)))
    try:
        return _choose(gather, world, base, wanted, before, also, found, fetching)
    except FileNotFoundError as error:
        unread = [f"cluster {m}: {why}" for m, why in enumerate(gather(fetching.trouble)) if why]
        if unread:
            raise ValueError(f"{error}; {'; '.join(unread)}") from None
        raise


def _choose(
    gather: Gather,
    world: World,
    base: str | Path,
    wanted: str | None,
    before: int | None,
    also: Callable[[str], str | None],
    found: list[Any],
    fetching: Fetching,
) -> tuple[int, str]:
    if wanted is None:
        examine = partial(_examine, gather, world, base, also, found, fetching)
        chosen = newest_good(found, base, examine, world.rank == 0, before)
        return chosen.sources[world.cluster_id]
    sources = common_tag(found, base, wanted)
    candidate = Candidate(wanted, 0, tuple(sources))
    told = _examine(gather, world, base, also, found, fetching, candidate)
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
    found: list[Any],
    fetching: Fetching,
    candidate: Candidate,
) -> list[str | None]:
    """Return by cluster what one of its ranks finds wrong with the files of a tag.

    What is at a remote place alone is fetched, and so looked over.
    """
    own = world.cluster_id
    source, name = candidate.sources[own]
    is_far = fetching.is_far(tags_of(found[own], own, source)[name])
    bringing = fetching.begin(source, name) if is_far else None
    while fetching.is_on:  # who has all waits for the others, however long their lines take
        is_over = bringing is None or bringing.is_over(world.deadline_seconds / 8)
        if all(gather(all(gather_objects(is_over)))):
            break
    if bringing is not None:
        trouble = bringing.complete() or also(name)
    else:
        directory = cluster_directory(base, source) / name
        trouble = also(name) or find_damage(directory, world.rank, world.world_size)
    ours = gather_objects(trouble)
    return gather(next((trouble for trouble in ours if trouble), None))


def _others(found: list[list[dict[str, Any]]], wanted: str) -> str:
    there = sorted({tag for own, _ in found for tag in own} - {wanted})
    return (
        f"load an earlier checkpoint, in all clusters (there: {', '.join(there) or 'none'}), leave "
        "tag=... out (the newest good one is taken), or bring an intact copy"
    )
