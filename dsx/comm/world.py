"""Set up one torch.distributed world per cluster, and the store that joins the clusters.

Runs before anything else touches torch.distributed. With one launcher over everything the ranks
are split and `RANK` / `WORLD_SIZE` rewritten, so that DeepSpeed, which adopts an existing world,
sees only its own cluster (`LOCAL_RANK` stays: it is the device's number on this host). With one
launcher per cluster the world is the launcher's own, and the clusters meet at a store elsewhere.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dsx.comm.cluster_world import collective_limit, init_cluster_world
from dsx.comm.forked_children import end_workers_with_parent
from dsx.comm.gloo import GlooTransport
from dsx.comm.gloo_groups import GlooConnections, open_device
from dsx.comm.in_cluster import InCluster
from dsx.comm.joining import (
    RendezvousConfig,
    agree_session,
    join_by_links,
    join_one_launcher,
    join_own_launcher,
    tell_where,
)
from dsx.comm.launcher_watch import end_with_launcher
from dsx.comm.rendezvous import Rendezvous
from dsx.comm.store import open_store
from dsx.comm.topology import LauncherEnvironment, RankInfo
from dsx.core.membership import Member, Membership, Seat
from dsx.core.transport import PeerLost, Transport
from dsx.core.types import Stage
from dsx.core.waits import waiting_for

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.clerk import Clerk
    from dsx.comm.links.coming import Coming
    from dsx.comm.links.desk import Desk
    from dsx.comm.links.door import GoingOn, Knock
    from dsx.comm.links.host_port import Where
    from dsx.comm.links.link import Link
    from dsx.comm.links.meeting import Met

_VIEW_SECONDS = 15.0  # for a view, once who is silent counts as lost


class World:
    """This process's place, its cluster's world, and the way to the other clusters."""

    def __init__(
        self,
        seat: Seat,
        rank_info: RankInfo,
        rendezvous: Rendezvous,
        cluster_store: dist.Store,
        config: RendezvousConfig,
        link: Link | None = None,
        desk: Desk | None = None,
        joins: GoingOn | None = None,
        met: Met | None = None,
    ) -> None:
        """`joins`: the run that goes on, that takes this cluster in; `met`: over links."""
        self.seat = seat
        self.desk = desk  # where members' tools ask; of the first rank of a run with keys
        self.rank_info = rank_info
        self._cluster_store = cluster_store
        self.rendezvous = rendezvous
        self._config = config
        self._transports = 0
        self._own_stores = 0
        self._handles = 0
        self._in_cluster: InCluster | None = None
        self.link, self._met = link, met
        self.joins = joins
        self.coming: Coming | None = None  # of a run whose clusters may be lost, and come back
        self._num_finished = 0

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
    def clerk(self) -> Clerk | None:
        """What has this cluster's part in the log; of the first rank, over links with members."""
        return None if self.coming is None else self.coming.clerk

    def limit_rate(self, mbit: float) -> None:
        """Send no more than that from this cluster's ranks together, over links."""
        if self.link is not None:
            self.link.limit(mbit)

    @property
    def others_may_go_on(self) -> bool:
        """Whether the run could ever go on without this cluster, which goes in order."""
        link = self._config.link
        if self.link is None or link is None or not link.members:
            return False
        votes = [2 + (id == link.arbiter_id) for id in self.seat.ids]
        return 2 * (sum(votes) - votes[self.seat.position]) > sum(votes)

    @property
    def has_one_launcher(self) -> bool:
        """Whether all clusters were started by one launcher, and so write to one terminal."""
        return self._config.rendezvous == "env://" and self._config.cluster_id is None

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
        return self._connect_own(f"{name}_{self._own_stores}")

    def _connect_own(self, name: str) -> dist.Store:
        store: Any = self._cluster_store
        beneath = store.underlying_store
        deadline = self._config.join_deadline_seconds
        own = open_store(beneath.host, beneath.port, is_host=False, deadline_seconds=deadline)
        return dist.PrefixStore(f"dsx/{self.session}/cluster_{self.cluster_id}/{name}", own)

    def finish(self) -> None:
        """Note that an engine has done its work in all clusters; after the last, all may leave."""
        self._num_finished += 1
        if self.coming is not None and self._num_finished >= self._handles:
            self.coming.finish()

    def connect(self, fragments: list[int], stage: Stage, streams: int = 1) -> Transport:
        """Connect this rank to its peers, the ranks with the same number in the other clusters.

        `fragments` are the ids of those of its `stage` that this rank has to do with; each has
        `streams` connections to every peer.
        """
        config = self._config
        self._transports += 1
        prefix = f"transport_{self._transports}/rank_{self.rank}"
        notes = dist.PrefixStore(f"transport_{self._transports}", self._cluster_store)
        notes = notes if self.world_size > 1 else None
        if self.link is not None:
            return self._connect_links(self.link, fragments, stage, prefix, notes)
        device = open_device(config.interface)  # one for all groups

        deadline = timedelta(seconds=config.join_deadline_seconds)
        store = self.rendezvous.group_store(prefix)
        num_groups = 1 + streams * len(fragments)
        connections = GlooConnections(store, self.seat, deadline, device, num_groups)

        def connect(what: str, streams: int) -> list[Any]:
            try:
                with waiting_for(f"connections of the {what}", config.join_deadline_seconds):
                    return connections.connect(what, streams)
            except PeerLost:
                raise
            except RuntimeError as error:
                raise PeerLost(
                    f"cannot connect the {what} of rank {self.rank} to the other "
                    f"{self.num_clusters - 1} cluster(s) within "
                    f"{config.join_deadline_seconds:g} s (clusters.join_deadline_seconds): "
                    f"{str(error).splitlines()[0]}"
                ) from error

        return GlooTransport(
            fragments, connect, self.seat, config.deadline_seconds, stage, streams, notes,
            device.ports,
        )  # fmt: skip

    def _connect_links(
        self, link: Link, fragments: list[int], stage: Stage, prefix: str, notes: Any
    ) -> Transport:
        from dsx.comm.elastic import ElasticTransport
        from dsx.comm.links.coming import Coming
        from dsx.comm.links.meeting import wait_for_peers
        from dsx.comm.links.transport import LinkTransport

        assert self._met is not None
        config, deadline = self._config, self._config.deadline_seconds
        ids, processes = [self.seat.ids[peer] for peer in self.seat.others], self._met.processes
        if self.joins is None:
            wait_for_peers(link, ids, config.join_deadline_seconds)

        def make(seat: Seat, part: str = "") -> GlooTransport:
            view = f"view_{seat.membership.epoch}{part}"
            of_view = None if notes is None else dist.PrefixStore(view, notes)
            name = f"{self.session}/{prefix}/{view}"
            return LinkTransport(link, name, fragments, seat, deadline, stage, of_view)

        if config.link is None or not config.link.members or not ids:
            return make(self.seat)
        if self.coming is None:
            self.coming = Coming(
                link, self._config, self.rank_info, self.rendezvous, self._connect_own, self._met,
                self.joins is not None,
            )  # fmt: skip
        views, is_first = self.coming.views(processes), self._transports == 1
        if self.desk is not None and self.coming.clerk is not None and is_first:
            self.desk.facts.append(self.coming.clerk.facts)
            self.desk.verbs["force_view"] = self.coming.clerk.force
        patience = config.link.suspect_seconds + _VIEW_SECONDS
        members = tuple(Member(id, process=processes[id]) for id in sorted(processes))
        seat = Seat(Membership(0, members, self.seat.ids), self.cluster_id)
        return ElasticTransport(
            make, seat, views, deadline, patience, lambda what: what.on(stage),
            speaks=self.rank == 0, follows=self.joins is not None,
        )  # fmt: skip

    def serve(self, serve: Callable[..., None], first: bytes) -> None:
        """Answer ranks of this one's number in other clusters whose requests begin so."""
        if self.link is not None and self._config.can_be_joined:
            self.link.serve(serve, first)

    def ask(self, cluster: int, body: bytes) -> Future[bytes]:
        """Ask the rank of this one's number in another cluster."""
        assert self.link is not None
        return self.link.ask((cluster, self.rank), body)


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
    link: Link | None = None
    where: Where | None = None
    own: Met | None = None
    desk: Desk | None = None
    knock: Knock | None = None
    if config.link is not None and config.cluster_id is not None:
        joined = join_by_links(launcher, config.link, config)
        rank_info, launcher_store = joined.rank_info, joined.launcher_store
        shared_store, link, where = joined.shared_store, joined.link, joined.where
        desk, knock = joined.desk, joined.knock
    elif config.rendezvous == "env://":
        rank_info, launcher_store, shared_store = join_one_launcher(launcher, config)
    else:
        rank_info, launcher_store, shared_store = join_own_launcher(launcher, config)
    end_with_launcher()
    end_workers_with_parent()
    own_keys = f"dsx/start_{launcher.restarts}/cluster_{rank_info.cluster_id}"
    cluster_store = dist.PrefixStore(own_keys, launcher_store)
    init_cluster_world(rank_info, cluster_store, config.join_deadline_seconds, limit)
    met = agree_session(rank_info, cluster_store, shared_store, config, knock)
    seat = Seat.of(rank_info.cluster_id, rank_info.num_clusters)
    if config.link is not None and link is None and seat.others:
        from dsx.comm.links.trust import open_link

        link = open_link(config.link, rank_info.cluster_id, rank_info.rank, rank_info.world_size)
    joins = None if isinstance(met, str) else met
    session = met if isinstance(met, str) else met.session
    rendezvous = Rendezvous(
        shared_store, rank_info, session, config.deadline_seconds, cluster_store
    )
    if link is not None:
        from dsx.comm.links.host_port import where_alone

        atexit.register(link.close)  # what was sent last arrives
        where = where or where_alone(link, config, launcher.master_addr)
        rendezvous, own = tell_where(link, where, rendezvous, joins, cluster_store, config)
    _world = World(seat, rank_info, rendezvous, cluster_store, config, link, desk, joins, own)
    return _world
