"""How clusters meet over links, and how ranks that have met find each other's.

First ranks meet at the first member that can be called: its first rank keeps a store, at the
address that all have. They tell each other there where all ranks of their clusters are, and each
tells those of its own cluster where theirs of the same number are. So what is connected and asked
at one place grows with the number of clusters, or of a cluster's ranks, and never with both. Ranks
of another number have their own store, at that member's rank of their number, which they are
connected with for what they exchange later.

Of two ranks the later cluster's calls, unless the earlier one's only can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dsx.comm.links.host_port import Where
from dsx.comm.links.link import Link
from dsx.comm.links.places import Place, Ranks
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.store import LinkStore, Shelf
from dsx.comm.open_files import make_room
from dsx.comm.through_first import through_first
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_LOOK_SECONDS = 0.1
_FILES_OF_CONNECTION = 5  # itself, and what libzmq wakes up its threads by


def open_meeting(
    settings: LinkSettings,
    rank_info: RankInfo,
    link: Link,
    deadline_seconds: float,
    look: Callable[[int], bool] | None = None,
) -> LinkStore:
    """Return the store that the ranks of this number meet at, in all clusters.

    The first rank waits until it is there; PeerLost, and the link closed, if nobody answers. Others
    reach theirs once they are met (`meet_peers`). ValueError if nobody can be called. `look` is
    asked, with the store's holder, until it says that it need not be waited for.
    """
    own = rank_info.cluster_id
    addresses = [settings.address_of(m) for m in range(len(settings.names))]
    callable_ones = [m for m, address in enumerate(addresses) if address is not None]
    if not callable_ones and own not in settings.through_relay:
        link.close()
        raise ValueError(
            "link.members: nobody has an address, so nobody can be called: give one member "
            "NAME=HOST:PORT, or give link.relay, the address of a `dsx relay`"
        )
    holder = callable_ones[0] if callable_ones else 0
    if own == holder:
        link.serve(Shelf().serve)
    elif rank_info.rank == 0:
        address = addresses[holder] or link.ways.get((holder, 0))
        link.expect(holder, 0, address)
        what = f"the first rank of {settings.names[holder]} (cluster {holder}) at {address}"
        try:
            with waiting_for(what, deadline_seconds):
                _wait_for(link, holder, deadline_seconds, look)
        except (TimeoutError, RuntimeError) as error:
            link.close()
            raise PeerLost(
                f"{what} did not answer within {deadline_seconds:g} s "
                f"(clusters.join_deadline_seconds): {error}"
            ) from error
    return LinkStore(link, (holder, rank_info.rank))


def _wait_for(link: Link, holder: int, seconds: float, look: Callable[[int], bool] | None) -> None:
    if look is None:
        return link.wait_for(holder, 0, seconds)
    until = time.monotonic() + seconds
    while not look(holder):
        try:
            link.wait_for(holder, 0, min(_LOOK_SECONDS, max(until - time.monotonic(), 0.0)))
            time.sleep(_LOOK_SECONDS)  # it is there: until it has said something
        except TimeoutError:
            if time.monotonic() > until:
                raise
    return None


@dataclass(frozen=True)
class Met:
    """Where ranks are called: this one, `peers` of its number by cluster, this one among them; all
    of the `own` cluster, which its first rank alone knows.
    """  # fmt: skip

    address: str | None  # of this rank
    peers: Mapping[int, Place]
    own: Ranks | None

    @property
    def processes(self) -> dict[int, int]:
        """The incarnations of the peers, this one with them."""
        return {cluster: process for cluster, (_, _, process) in self.peers.items()}


def meet_peers(
    shared: dist.Store,
    own: dist.Store | None,
    link: Link,
    where: Where,
    rank_info: RankInfo,
    deadline_seconds: float,
    streams: int = 1,
) -> Met:
    """Find the ranks with this one's number in other clusters, and begin to connect with them.

    `shared` is where first ranks meet, and `own` the cluster's key space, None of one rank. Each
    peer has `streams` connections besides the one for short messages: ValueError if this process
    may not have as many files open. PeerLost names who does not come.

    The later cluster calls the earlier one, unless that one can only call.
    """
    count = rank_info.num_clusters
    make_room(
        _FILES_OF_CONNECTION * (streams + 1) * (count - 1),
        f"{streams + 1} connections to each of {count - 1} clusters",
    )
    all_own: list[Ranks] = []

    def exchange(places: list[Place]) -> list[list[Place]]:
        ranks = Ranks.of(places)
        all_own.append(ranks)
        told = _tell_first_ranks(shared, ranks, rank_info, deadline_seconds)
        return [list(of_number) for of_number in zip(*(t.places for t in told), strict=True)]

    place = where.address, where.slot, link.incarnation
    if own is None:
        of_number = exchange([place])[0]
    else:
        of_number = through_first(
            own, "places", rank_info, place, exchange, deadline_seconds, deadline_seconds
        )
    peers = dict(enumerate(Ranks.of(of_number).places))
    addresses = {cluster: address for cluster, (address, _, _) in peers.items()}
    for cluster, (_, slot, process) in peers.items():
        if cluster != link.cluster_id:
            address = address_to_call(link.cluster_id, cluster, addresses)
            if address is None and cluster < link.cluster_id:
                address = link.ways.get((cluster, link.rank))
            link.expect(cluster, link.rank, address, process, slot)
    return Met(where.address, peers, all_own[0] if all_own else None)


def wait_for_peers(link: Link, clusters: Sequence[int], deadline_seconds: float) -> None:
    """Return once the links to ranks of this number stand; PeerLost names one that does not."""
    for cluster in clusters:
        what = f"a link to rank {link.rank} of cluster {cluster}"
        try:
            with waiting_for(what, deadline_seconds):
                link.wait_for(cluster, link.rank, deadline_seconds)
        except (TimeoutError, RuntimeError) as error:
            raise PeerLost(
                f"{what} does not stand within {deadline_seconds:g} s "
                f"(clusters.join_deadline_seconds): {error}"
            ) from error


def _tell_first_ranks(
    store: dist.Store, own: Ranks, rank_info: RankInfo, deadline_seconds: float
) -> list[Ranks]:
    """Return where the ranks of all clusters are, by cluster; PeerLost names who says nothing."""
    keys = [f"places/{cluster}" for cluster in range(rank_info.num_clusters)]
    store.set(keys[rank_info.cluster_id], own.pack())
    try:
        with waiting_for("where other clusters' ranks can be called", deadline_seconds):
            store.wait(keys, timedelta(seconds=deadline_seconds))
            return [Ranks.unpack(store.get(key).decode()) for key in keys]
    except RuntimeError as error:
        try:
            silent = [c for c, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:  # the store has gone
            silent = []
        who = f"cluster(s) {', '.join(map(str, silent))}" if silent else "other clusters"
        raise PeerLost(
            f"where the ranks of {who} can be called was not said within {deadline_seconds:g} s "
            f"(clusters.join_deadline_seconds): {str(error).splitlines()[0]}"
        ) from error


def address_to_call(own: int, other: int, addresses: Mapping[int, str | None]) -> str | None:
    """Return where to call another cluster; None if it calls. All before it have said theirs."""
    if other > own:
        return addresses[other] if addresses[own] is None else None
    return addresses[other]
