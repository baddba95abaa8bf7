"""What a script tracks is dealt between the clusters that are there, where it can be.

That is so for training data that all clusters share, in runs over links whose members may be lost:
`training_data` of `dsx.initialize`, and a tracked `ClusterBatches`. Any other object keeps its own
place, as the script says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dsx.comm.elastic import ElasticTransport
from dsx.comm.world import World
from dsx.data.deal import Dealt
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from dsx.training.positions import Resumable

logger = logging.getLogger(__name__)


def deal_tracked(
    loop: OuterLoop, world: World, num_shards: int, objects: Mapping[str, Resumable]
) -> None:
    """Let what is left of a lost cluster's share of these be read by the others."""
    if not num_shards or not isinstance(loop.transport, ElasticTransport):
        return
    places = loop.notices.places
    for name, one in objects.items():
        if not isinstance(one, Dealt) or one.samples_per_epoch is None:
            continue
        if loop.adapter.stage.count > 1:
            logger.warning(
                "%r: between clusters of pipeline stages nothing is dealt yet: what a lost cluster "
                "has not read stays unread", name,
            )  # fmt: skip
            continue
        num_clusters = len(loop.transport.seat.membership.places)
        places.follow(name, one, world.cluster_id, num_clusters, num_shards)


def follow_boundaries(loop: OuterLoop) -> None:
    """Deal at each boundary, before whatever else is done there."""
    and_then: Callable[[], object] = loop.at_boundary

    def pass_boundary() -> None:
        numbers = [t.attempt.what.number for t in loop.in_flight if isinstance(t, Transfer)]
        loop.notices.places.pass_boundary(min(numbers, default=float("inf")))
        and_then()

    loop.at_boundary = pass_boundary
