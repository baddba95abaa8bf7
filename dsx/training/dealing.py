"""What a script tracks is dealt between the clusters that are there, where it can be.

That is so for training data that all clusters share, in runs over links whose members may be lost:
`training_data` of `dsx.initialize`, and a tracked `ClusterBatches`. Any other object keeps its own
place, as the script says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.comm.elastic import ElasticTransport
from dsx.comm.world import World
from dsx.data.deal import Dealt
from dsx.data.recut import recut
from dsx.outer.loop import OuterLoop
from dsx.outer.places import Places
from dsx.outer.saved_places import AgreedPlaces, SavedPlaces, take_told
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
) -> None:
    """Go on reading where all were; one that `is_new` goes on where the others know it.

    Collective over all clusters where anything is dealt; ValueError, in all of them, if they have
    not saved the same.
    """
    places, ids = loop.notices.places, loop.transport.seat.ids
    num_clusters = len(loop.transport.seat.membership.places)
    _warn_of_unheard(places, deals)
    if not places.names:
        restore_positions(tracked, states, directory, is_other_number)
        return
    known = {name: deals[name] for name in places.names if name in deals}
    is_cut_anew = any(len(deal["shares"]) != num_clusters for deal in known.values())
    foreign = [
        name for name in known
        if is_cut_anew and not _is_of_same_data(tracked[name], states[name])
    ]  # fmt: skip
    own = _saved_places(loop, known, foreign, is_new)
    agreed = AgreedPlaces.of(
        own, lambda value: [*loop.transport.gather("places in the data", value)()]
    )
    dealt = [name for name in known if name not in foreign]
    apart = {name for name in dealt if is_new or is_cut_anew}
    restore_positions(
        {name: one for name, one in tracked.items() if name not in apart},
        {name: one for name, one in states.items() if name not in apart},
        directory,
        is_other_number or is_cut_anew,
    )
    for name in dealt:
        deal = agreed.deal(name)
        if is_cut_anew:
            standing, length = agreed.standing(name, deal), places.samples_per_epoch(name)
            logger.warning(
                "%r: the data were cut for %d clusters and are for %d now: what none of them has "
                "trained on of the epoch that had begun is read first, shared between all",
                name, len(deal.shares), num_clusters,
            )  # fmt: skip
            deal = recut(deal, standing, num_clusters, length)
        places.adopt(name, deal, is_own=name not in apart)
    places.resume(ids, agreed.launched)
    if apart:
        places.begin_reading(apart)


def _saved_places(
    loop: OuterLoop, deals: Mapping[str, Any], foreign: Sequence[str], is_new: bool
) -> SavedPlaces:
    """Return what this cluster's checkpoint says. Collective over the ranks of the cluster."""
    told: dict[int, dict[str, Any]] = {}
    for of_rank in loop.adapter.ranks.gather(take_told(loop.in_flight)):  # one may send nothing
        for number, at in of_rank.items():
            told.setdefault(number, {}).update(at)
    return SavedPlaces(
        cluster=loop.transport.seat.cluster_id,
        deals=deals,
        foreign=foreign,
        takes_others=is_new,
        step=loop.history.step,
        launched=sum(loop.history.launches),
        under_way=[t.attempt.what.number for t in loop.in_flight if isinstance(t, Transfer)],
        told=sorted(told.items()),
    )


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
