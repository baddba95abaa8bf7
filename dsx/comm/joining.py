"""How a process finds its cluster's world and the store that joins all clusters.

With one launcher over everything its ranks are split; with one per cluster they meet at a store
elsewhere, or over links.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dsx.comm.address import parse_address
from dsx.comm.links.extra import require_extra
from dsx.comm.links.settings import LinkSettings
from dsx.comm.meet import RunGoesOn, hello_of, meet, refuse_second_host, require_same_kind
from dsx.comm.open_files import make_room
from dsx.comm.rendezvous import Recorded, Rendezvous
from dsx.comm.store import open_store
from dsx.comm.through_first import through_first
from dsx.comm.topology import LauncherEnvironment, RankInfo, split_world
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.desk import Desk
    from dsx.comm.links.door import GoingOn, Knock
    from dsx.comm.links.host_port import Where
    from dsx.comm.links.link import Link
    from dsx.comm.links.meeting import Met

logger = logging.getLogger(__name__)

_STORE_CONNECTIONS = 4  # of a rank to its cluster's store: one per thread that may wait there


@dataclass(frozen=True)
class RendezvousConfig:
    """How clusters find each other: the "clusters" part of the configuration."""

    num_clusters: int
    cluster_id: int | None
    rendezvous: str
    store: str
    join_deadline_seconds: float
    deadline_seconds: float
    interface: str | None
    may_differ: tuple[str, ...] = ()
    link: LinkSettings | None = None  # None: gloo

    @property
    def can_be_joined(self) -> bool:
        """Whether a cluster that is lost, and started again, can join the others' run."""
        return self.link is not None and bool(self.link.members) and self.num_clusters > 1


def join_one_launcher(
    launcher: LauncherEnvironment, config: RendezvousConfig
) -> tuple[RankInfo, dist.Store, dist.Store]:
    """Split one launcher's ranks, whose store is that of all clusters, too.

    Returns the place, the cluster's own launcher's store, and the one where clusters meet.
    """
    if config.cluster_id is not None:
        raise ValueError(
            f"clusters.cluster_id={config.cluster_id} says one launcher per cluster, but no "
            "rendezvous is given: set clusters.rendezvous (or --dsx-rendezvous) to tcp://host:port"
        )
    rank_info = split_world(launcher.rank, launcher.world_size, config.num_clusters)
    store = _launcher_store(launcher, config)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank_info.rank), str(rank_info.world_size)
    return rank_info, store, store


def join_own_launcher(
    launcher: LauncherEnvironment, config: RendezvousConfig
) -> tuple[RankInfo, dist.Store, dist.Store]:
    """Meet the other launchers' clusters at a store of torch's; returns as the one above."""
    host, port = parse_address(config.rendezvous)
    if config.cluster_id is None:
        raise ValueError(
            f"clusters.rendezvous={config.rendezvous!r} says one launcher per cluster: say which "
            f"one this is with --dsx-cluster-id or clusters.cluster_id, 0.."
            f"{config.num_clusters - 1}"
        )
    rank_info = RankInfo(config.cluster_id, config.num_clusters, launcher.rank, launcher.world_size)
    is_host = config.store == "cluster_0" and rank_info.cluster_id == 0 and rank_info.rank == 0
    if is_host:
        callers = config.num_clusters * (launcher.world_size + 1)
        make_room(callers, f"the store of {config.num_clusters} x {launcher.world_size} ranks")
    shared = open_store(
        host,
        port,
        is_host=is_host,
        deadline_seconds=config.join_deadline_seconds,
        look_at_holder=lambda: refuse_second_host(host, port),
    )
    return rank_info, _launcher_store(launcher, config), shared


@dataclass
class LinkJoin:
    """How a rank stands with the other clusters over links, before they have met."""

    rank_info: RankInfo
    launcher_store: dist.Store
    shared_store: dist.Store
    link: Link
    where: Where
    desk: Desk | None = None  # what the first rank of members that have keys answers to their tools
    knock: Knock | None = None  # of the first rank, where a run may go on without this cluster


def join_by_links(
    launcher: LauncherEnvironment, settings: LinkSettings, config: RendezvousConfig
) -> LinkJoin:
    """Connect to where clusters meet over links; the first rank also asks whether a run goes on."""
    require_extra()
    from dsx.comm.links.desk import Desk
    from dsx.comm.links.door import Knock
    from dsx.comm.links.host_port import open_on_host
    from dsx.comm.links.meeting import open_meeting

    assert config.cluster_id is not None
    rank_info = RankInfo(config.cluster_id, config.num_clusters, launcher.rank, launcher.world_size)
    own, seconds = _launcher_store(launcher, config), config.join_deadline_seconds
    of_ports = dist.PrefixStore(f"dsx/start_{launcher.restarts}/host_port", own)
    link, where = open_on_host(
        settings, rank_info, of_ports, launcher.master_addr, seconds, config.interface
    )
    knock = None
    if config.can_be_joined:
        link.readmit()
        knock = Knock(link, settings) if rank_info.rank == 0 else None
    is_served = rank_info.rank == 0 and settings.security == "curve"
    desk = Desk(link, settings.names) if is_served else None
    look = None if knock is None else knock.is_decided
    store = open_meeting(settings, rank_info, link, seconds, look)
    return LinkJoin(rank_info, own, store, link, where, desk, knock)


def _launcher_store(launcher: LauncherEnvironment, config: RendezvousConfig) -> dist.Store:
    is_host = launcher.rank == 0 and not launcher.store_is_hosted
    if is_host:
        made = _STORE_CONNECTIONS * launcher.world_size
        try:
            make_room(made, f"the store of {launcher.world_size} ranks")
        except ValueError as error:  # at most so many, and fewer may do
            logger.warning("%s", error)
    return open_store(
        launcher.master_addr,
        launcher.master_port,
        is_host=is_host,
        deadline_seconds=config.join_deadline_seconds,
    )


def agree_session(
    rank_info: RankInfo,
    cluster_store: dist.Store,
    shared_store: dist.Store,
    config: RendezvousConfig,
    knock: Knock | None = None,
) -> str | GoingOn:
    """Let rank 0 meet the other clusters and pass the session's name, or its error, on.

    Or, as `knock` finds it, the run that goes on without this cluster, on all ranks.
    """
    key = "dsx/session"
    if rank_info.rank != 0:
        wait = timedelta(seconds=config.join_deadline_seconds + 30)
        try:
            with waiting_for("rank 0, which meets the other clusters", wait.total_seconds()):
                cluster_store.wait([key], wait)
            session = cluster_store.get(key).decode()
        except RuntimeError as error:
            raise PeerLost(
                f"cluster {rank_info.cluster_id}: its rank 0, which meets the other clusters, has "
                f"ended, or has not come back within {wait.total_seconds():g} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        if session.startswith("error:"):
            raise PeerLost(session.removeprefix("error:"))
        if not session.startswith("joins:"):
            return session
        from dsx.comm.links.door import GoingOn

        return GoingOn(session.removeprefix("joins:"), {})
    look = (lambda: None) if knock is None else knock.look
    try:
        if (found := look()) is not None:
            raise RunGoesOn(found)
        seconds = config.join_deadline_seconds
        session = meet(shared_store, rank_info, seconds, config.may_differ, look)
    except RunGoesOn as run:
        try:
            goes_on = _checked(run.found, rank_info, config)
        except ValueError as error:
            cluster_store.set(key, f"error:{error}")
            raise
        cluster_store.set(key, f"joins:{goes_on.session}")
        return goes_on
    except (PeerLost, ValueError) as error:
        cluster_store.set(key, f"error:{error}")
        raise
    cluster_store.set(key, session)
    return session


def _checked(
    found: Mapping[int, Mapping[str, Any]], rank_info: RankInfo, config: RendezvousConfig
) -> GoingOn:
    """Return the run that goes on; ValueError if this cluster cannot be one of its."""
    from dsx.comm.links.door import going_on_of

    own = hello_of(rank_info, config.may_differ)
    for cluster, told in found.items():
        require_same_kind(rank_info, own, cluster, told["hello"])
    return going_on_of(found)


def let_in(
    link: Link, where: Where, run: GoingOn, store: dist.Store, rank_info: RankInfo, seconds: float
) -> tuple[Met, list[tuple[str, list[Any]]]]:
    """Meet the ranks of this one's number in the clusters that train; return what those compared.

    `store` is the cluster's own. Rank 0 tells their doors where all ranks of this cluster are, and
    those where the others' are.
    """
    from dsx.comm.links.door import RECORDS, enter, meet_rank, unpacked_records
    from dsx.comm.links.meeting import Met
    from dsx.comm.links.places import Ranks

    rank, own = rank_info.rank, list[Ranks]()

    def enter_all(places: list[Any]) -> list[list[Any]]:
        own.append(Ranks.of(places))
        try:
            enter(link, [*run.clusters], own[0], seconds)
        except (TimeoutError, RuntimeError) as error:
            raise PeerLost(str(error)) from error
        of_number = zip(*(ranks.places for ranks in run.clusters.values()), strict=True)
        return [list(zip(run.clusters, places, strict=True)) for places in of_number]

    place = where.address, where.slot, link.incarnation
    try:
        with waiting_for("the run that goes on", seconds):
            told = through_first(store, "places", rank_info, place, enter_all, seconds, seconds)
            peers = {int(cluster): Ranks.of([there]).places[0] for cluster, there in told}
            for cluster, there in peers.items():
                meet_rank(link, cluster, there, where.address)
            for cluster in peers:
                link.wait_for(cluster, rank, seconds)
            asked = link.ask((min(peers), rank), RECORDS)
            records = unpacked_records(asked.result(seconds))
    except (TimeoutError, RuntimeError) as error:
        raise PeerLost(
            f"cluster {rank_info.cluster_id} cannot join the run that goes on: rank {rank} does "
            f"not reach the ranks of its number there within {seconds:g} s "
            f"(clusters.join_deadline_seconds): {error}"
        ) from error
    return Met(where.address, {link.cluster_id: place}, own[0] if own else None), records


def tell_where(
    link: Link,
    where: Where,
    rendezvous: Rendezvous,
    joins: GoingOn | None,
    cluster_store: dist.Store,
    config: RendezvousConfig,
) -> tuple[Rendezvous, Met]:
    """Tell the others where this rank is called, and begin to connect with its peers.

    Returns also by what it compares values with them.
    """
    from dsx.comm.links.meeting import meet_peers

    rank_info, seconds = rendezvous.rank_info, config.join_deadline_seconds
    if joins is None:
        assert config.link is not None
        shared, streams = rendezvous.group_store("links"), config.link.streams
        return rendezvous, meet_peers(
            shared, cluster_store, link, where, rank_info, seconds, streams
        )
    met, records = let_in(link, where, joins, cluster_store, rank_info, seconds)
    own = Recorded(cluster_store, rank_info, joins.session, config.deadline_seconds, records)
    return own, met
