"""What a script tracks is dealt between the clusters that are there, where it can be.

That is so for training data that all clusters share, in runs over links whose members may be lost:
`training_data` of `dsx.initialize`, and a tracked `ClusterBatches`. Any other object keeps its own
place, as the script says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsx.comm.elastic import ElasticTransport
from dsx.comm.world import World
from dsx.data.deal import Dealt
from dsx.outer.loop import OuterLoop
from dsx.outer.places import Places
from dsx.outer.transfer import Transfer
from dsx.training.positions import Resumable, restore_positions

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
            level = logging.DEBUG if world.rank else logging.WARNING
            logger.log(
                level, "%r: between clusters of pipeline stages nothing is dealt yet: what a lost "
                "cluster has not read stays unread", name,
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


def restore_data(
    loop: OuterLoop,
    tracked: Mapping[str, Resumable],
    directory: Path,
    states: dict[str, Any],
    deals: Mapping[str, Any],
    is_new: bool,
    is_other_number: bool,
    may_be_unequal: bool,
) -> None:
    """Go on reading where all were; one that `is_new` goes on where the others know it.

    Collective over all clusters where their number is another than the data were cut for, or they
    may have saved at unequal steps.
    """
    places, seat = loop.notices.places, loop.transport.seat
    launched = sum(loop.history.launches)
    known = {name for name in deals if name in places}
    places_now = len(seat.membership.places)
    is_cut_anew = any(len(deals[name]["shares"]) != places_now for name in known)
    _warn_of_unheard(places, deals)

    def gather(value: Any) -> list[Any]:
        return [*loop.transport.gather("places in the data", value)()]

    apart = {name: states[name] for name in known if is_new or is_cut_anew}
    if is_cut_anew:
        apart = {name: one for name, one in apart.items() if _is_of_same_data(tracked[name], one)}
    rest = {name: one for name, one in tracked.items() if name not in apart}
    restore_positions(
        rest, {n: s for n, s in states.items() if n not in apart}, directory,
        is_other_number or is_cut_anew,
    )  # fmt: skip
    if is_cut_anew:
        same = {name: deals[name] for name in apart}
        places.recut(same, is_new, places_now, gather)
        places.resume(seat.ids, max(gather(launched)))
        return
    places.load(deals)
    if may_be_unequal:
        places.meet(deals, is_new, loop.history.step, gather)
        launched = max(gather(launched))  # the same in all, which may have saved apart
    places.resume(seat.ids, launched)
    if is_new:
        places.begin_reading(deals)


def _warn_of_unheard(places: Places, deals: Mapping[str, Any]) -> None:
    """Say what of the settings does not hold, or of the checkpoint."""
    for name, deal in sorted(deals.items()):
        if name not in places:
            logger.warning(
                "%r: what lost clusters have left unread in this checkpoint is read by nobody, as "
                "nothing is dealt here (clusters.data_shards, or a loader that cannot be dealt)",
                name,
            )
        elif deal["num_shards"] != (wanted := places.num_shards(name)):
            logger.warning(
                "%r goes on in the %d shards of its checkpoint; clusters.data_shards=%d is for a "
                "run that begins", name, deal["num_shards"], wanted,
            )  # fmt: skip


def _is_of_same_data(reads: object, state: Mapping[str, Any]) -> bool:
    """Whether a saved position is in the data that is read now; if not it starts anew."""
    assert isinstance(reads, Dealt)
    try:
        reads.require_same_data(state)
    except ValueError:
        return False
    return True
