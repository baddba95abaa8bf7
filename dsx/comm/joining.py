"""How a process finds its cluster's world and the store that joins all clusters.

With one launcher over everything its ranks are split; with one per cluster they meet at a store
elsewhere, or over links.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dsx.comm.address import parse_address
from dsx.comm.links.extra import require_extra
from dsx.comm.links.settings import LinkSettings
from dsx.comm.rendezvous import meet, refuse_second_host
from dsx.comm.store import open_store
from dsx.comm.topology import LauncherEnvironment, RankInfo, split_world
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.desk import Desk
    from dsx.comm.links.host_port import Where
    from dsx.comm.links.link import Link


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
    shared = open_store(
        host,
        port,
        is_host=is_host,
        deadline_seconds=config.join_deadline_seconds,
        look_at_holder=lambda: refuse_second_host(host, port),
    )
    return rank_info, _launcher_store(launcher, config), shared


def join_by_links(
    launcher: LauncherEnvironment, settings: LinkSettings, config: RendezvousConfig
) -> tuple[RankInfo, dist.Store, dist.Store, Link, Where, Desk | None]:
    """Meet the other launchers' clusters over links.

    Returns as the one above, this rank's link, where others call it, and what the first rank of
    members that have keys answers to their tools.
    """
    require_extra()
    from dsx.comm.links.desk import Desk
    from dsx.comm.links.host_port import open_on_host
    from dsx.comm.links.meeting import open_meeting

    assert config.cluster_id is not None
    rank_info = RankInfo(config.cluster_id, config.num_clusters, launcher.rank, launcher.world_size)
    own, seconds = _launcher_store(launcher, config), config.join_deadline_seconds
    of_ports = dist.PrefixStore(f"dsx/start_{launcher.restarts}/host_port", own)
    link, where = open_on_host(settings, rank_info, of_ports, launcher.master_addr, seconds)
    is_served = rank_info.rank == 0 and settings.security == "curve"
    desk = Desk(link, settings.names) if is_served else None
    store = open_meeting(settings, rank_info, link, launcher.master_addr, seconds)
    return rank_info, own, store, link, where, desk


def _launcher_store(launcher: LauncherEnvironment, config: RendezvousConfig) -> dist.Store:
    return open_store(
        launcher.master_addr,
        launcher.master_port,
        is_host=launcher.rank == 0 and not launcher.store_is_hosted,
        deadline_seconds=config.join_deadline_seconds,
    )


def agree_session(
    rank_info: RankInfo,
    cluster_store: dist.Store,
    shared_store: dist.Store,
    config: RendezvousConfig,
) -> str:
    """Let rank 0 meet the other clusters and pass the session's name, or its error, on."""
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
        return session
    try:
        session = meet(shared_store, rank_info, config.join_deadline_seconds, config.may_differ)
    except (PeerLost, ValueError) as error:
        cluster_store.set(key, f"error:{error}")
        raise
    cluster_store.set(key, session)
    return session
