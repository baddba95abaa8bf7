"""Set up one torch.distributed world per cluster, and the store that joins the clusters.

Runs before anything else touches torch.distributed. With one launcher over everything the ranks
are split and `RANK` / `WORLD_SIZE` rewritten, so that DeepSpeed, which adopts an existing world,
sees only its own cluster (`LOCAL_RANK` stays: it is the device's number on this host). With one
launcher per cluster the world is the launcher's own, and the clusters meet at a store elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsx.comm.address import parse_address
from dsx.comm.cluster_world import collective_limit, init_cluster_world
from dsx.comm.forked_children import end_workers_with_parent
from dsx.comm.gloo import GlooTransport, connect_gloo, open_device
from dsx.comm.in_cluster import InCluster
from dsx.comm.launcher_watch import end_with_launcher
from dsx.comm.rendezvous import Rendezvous, meet, refuse_second_host
from dsx.comm.store import open_store
from dsx.comm.topology import LauncherEnvironment, RankInfo, split_world
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost
from dsx.core.types import Stage
from dsx.core.waits import waiting_for


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


class World:
    """This process's place, its cluster's world, and the way to the other clusters."""

    def __init__(
        self,
        seat: Seat,
        rank_info: RankInfo,
        rendezvous: Rendezvous,
        cluster_store: dist.Store,
        config: RendezvousConfig,
    ) -> None:
        self.seat = seat
        self.rank_info = rank_info
        self._cluster_store = cluster_store
        self.rendezvous = rendezvous
        self._config = config
        self._transports = 0
        self._own_stores = 0
        self._handles = 0
        self._in_cluster: InCluster | None = None

    @property
    def cluster_id(self) -> int:
        """This cluster, 0..num_clusters-1."""
        return self.seat.cluster_id

    @property
    def num_clusters(self) -> int:
        """C."""
        return self.seat.num_clusters

    @property
    def rank(self) -> int:
        """Rank inside the cluster."""
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        """Ranks of the cluster."""
        return self.rank_info.world_size

    @property
    def session(self) -> str:
        """The name of this run, the same in every cluster and different for every run."""
        return self.rendezvous.session

    @property
    def clusters(self) -> dict[str, Any]:
        """The "clusters" settings in force, with what was given at the launch."""
        return asdict(self._config)

    @property
    def deadline_seconds(self) -> float:
        """How long to wait for another process before giving up."""
        return self._config.deadline_seconds

    @property
    def in_cluster_seconds(self) -> float:
        """How long to wait for a rank of this cluster.

        It may wait for other clusters meanwhile, and is to say so first.
        """
        return 2 * self._config.deadline_seconds + 90

    @property
    def num_handles(self) -> int:
        """How many engines this process has attached."""
        return self._handles

    def new_handle_store(self) -> dist.Store:
        """Return the key space in this cluster of one more handle; all ranks make the same ones."""
        self._handles += 1
        return dist.PrefixStore(f"handle_{self._handles}", self._cluster_store)

    def in_cluster(self) -> InCluster:
        """Return what this cluster's ranks tell each other by. The first call is collective."""
        if self._in_cluster is None:
            self._in_cluster = InCluster(
                self.cluster_id,
                self.rank,
                self.world_size,
                dist.PrefixStore("in_cluster", self._cluster_store),
                self._config.join_deadline_seconds,
                self.in_cluster_seconds,
            )
        return self._in_cluster

    def connect_own_store(self, name: str) -> dist.Store:
        """Return a new key space of this cluster, over a connection that nobody else waits on.

        Every rank of the cluster makes the same ones.
        """
        self._own_stores += 1
        store: Any = self._cluster_store
        beneath = store.underlying_store
        deadline = self._config.join_deadline_seconds
        own = open_store(beneath.host, beneath.port, is_host=False, deadline_seconds=deadline)
        return dist.PrefixStore(
            f"dsx/{self.session}/cluster_{self.cluster_id}/{name}_{self._own_stores}", own
        )

    def connect(self, fragments: list[int], stage: Stage, streams: int = 1) -> GlooTransport:
        """Connect this rank to its peers, the ranks with the same number in the other clusters.

        `fragments` are the ids of those of its `stage` that this rank has to do with; each has
        `streams` connections to every peer.
        """
        config = self._config
        self._transports += 1
        prefix = f"transport_{self._transports}/rank_{self.rank}"

        device = open_device(config.interface)  # one for all groups

        def connect(what: str, streams: int) -> list[Any]:
            deadline = timedelta(seconds=config.join_deadline_seconds)
            store = self.rendezvous.group_store(f"{prefix}/{what}")
            try:
                with waiting_for(f"connections of the {what}", config.join_deadline_seconds):
                    return connect_gloo(store, self.seat, deadline, device, streams)
            except RuntimeError as error:
                raise PeerLost(
                    f"cannot connect the {what} of rank {self.rank} to the other "
                    f"{self.num_clusters - 1} cluster(s) within "
                    f"{config.join_deadline_seconds:g} s (clusters.join_deadline_seconds): "
                    f"{str(error).splitlines()[0]}"
                ) from error

        notes = dist.PrefixStore(f"transport_{self._transports}", self._cluster_store)
        return GlooTransport(
            fragments,
            connect,
            self.seat,
            config.deadline_seconds,
            stage,
            streams,
            notes if self.world_size > 1 else None,
            device.ports,
        )


_world: World | None = None


def current_world() -> World | None:
    """Return the world that `join` has set up in this process, if any."""
    return _world


def join(config: RendezvousConfig) -> World:
    """Create this cluster's torch.distributed world and meet the other clusters.

    Raises RuntimeError if torch.distributed is already initialised or the launcher's environment
    is missing, ValueError for a split that does not work, PeerLost if a cluster does not come.
    """
    global _world  # one process is in one world, like torch.distributed itself
    if _world is not None and dist.is_initialized():
        raise RuntimeError(
            "this process has joined its cluster's world already: `python -m dsx.run` does so "
            "before the script; take dsx.init_distributed out of it, or start it without dsx.run"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialised with one world over all clusters: call "
            "dsx.init_distributed(config) first, before deepspeed.init_distributed, "
            "deepspeed.initialize or torch.distributed.init_process_group"
        )
    launcher, limit = LauncherEnvironment.read(), collective_limit()
    if config.rendezvous == "env://":
        rank_info, launcher_store, shared_store = _join_one_launcher(launcher, config)
    else:
        rank_info, launcher_store, shared_store = _join_own_launcher(launcher, config)
    end_with_launcher()
    end_workers_with_parent()
    own_keys = f"dsx/start_{launcher.restarts}/cluster_{rank_info.cluster_id}"
    cluster_store = dist.PrefixStore(own_keys, launcher_store)
    init_cluster_world(rank_info, cluster_store, config.join_deadline_seconds, limit)
    session = _agree_session(rank_info, cluster_store, shared_store, config)
    rendezvous = Rendezvous(shared_store, rank_info, session, config.deadline_seconds)
    seat = Seat.of(rank_info.cluster_id, rank_info.num_clusters)
    _world = World(seat, rank_info, rendezvous, cluster_store, config)
    return _world


def _join_one_launcher(
    launcher: LauncherEnvironment, config: RendezvousConfig
) -> tuple[RankInfo, dist.Store, dist.Store]:
    if config.cluster_id is not None:
        raise ValueError(
            f"clusters.cluster_id={config.cluster_id} says one launcher per cluster, but no "
            "rendezvous is given: set clusters.rendezvous (or --dsx-rendezvous) to tcp://host:port"
        )
    rank_info = split_world(launcher.rank, launcher.world_size, config.num_clusters)
    store = _launcher_store(launcher, config)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank_info.rank), str(rank_info.world_size)
    return rank_info, store, store


def _join_own_launcher(
    launcher: LauncherEnvironment, config: RendezvousConfig
) -> tuple[RankInfo, dist.Store, dist.Store]:
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


def _launcher_store(launcher: LauncherEnvironment, config: RendezvousConfig) -> dist.Store:
    return open_store(
        launcher.master_addr,
        launcher.master_port,
        is_host=launcher.rank == 0 and not launcher.store_is_hosted,
        deadline_seconds=config.join_deadline_seconds,
    )


def _agree_session(
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
