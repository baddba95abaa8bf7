"""`DistributedSampler`, whoever makes one: what it shuffles is cut over the ranks of all clusters.

A script cuts its training data over the ranks that it sees, and under dsx those are of its cluster:
every cluster would read the same. So a sampler that shuffles, as one for training does, counts the
ranks of all clusters, as it would if they were one world: the same order, and no sample twice. One
that does not is taken for evaluation, and stays in the cluster, which sees all of it. Where
`clusters.data` is "own", each site has data of its own, and all samplers stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.utils.data import DistributedSampler

from dsx.comm.world import World, current_world
from dsx.data.cluster_batches import ClusterShard
from dsx.run.session import Session


def replace_sampler(session: Session) -> None:
    """Let a sampler that shuffles count the ranks of all clusters."""
    sampler: Any = DistributedSampler
    original = sampler.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        world, given = current_world(), bound.arguments
        is_cut = isinstance(given["dataset"], ClusterShard) or session.trainers  # they have cut
        if world and given["shuffle"] and not is_cut and session.whose_data != "own":
            given.update(_over_all_clusters(world, given["num_replicas"], given["rank"]))
        original(*bound.args, **bound.kwargs)

    sampler.__init__ = __init__


def _over_all_clusters(world: World, num_replicas: int | None, rank: int | None) -> dict[str, int]:
    """Return both numbers over all clusters; nothing where a script counts beyond this one.

    Fewer replicas than ranks are those of data parallelism beside another kind of it.
    """
    count = world.world_size if num_replicas is None else num_replicas
    if count > world.world_size:
        return {}
    own = world.rank if rank is None else rank
    return {"num_replicas": count * world.num_clusters, "rank": world.cluster_id * count + own}
