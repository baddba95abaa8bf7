"""How clusters meet over links, and how ranks that have met find each other's.

The store is that of the first member that can be called: its first rank has the values, at the
address that all have. Of two ranks the later cluster's calls, unless the earlier one's only can.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsx.comm.address import bracketed
from dsx.comm.links.host_port import Where
from dsx.comm.links.link import Link
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.store import LinkStore, Shelf
from dsx.comm.open_files import make_room
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_LOOK_SECONDS = 0.1


def open_meeting(
    settings: LinkSettings,
    rank_info: RankInfo,
    link: Link,
    master: str,
    deadline_seconds: float,
    look: Callable[[int], bool] | None = None,
) -> LinkStore:
    """Return the store that all meet at; PeerLost, and the link closed, if nobody answers there.

    `master` is the host of the own cluster's first rank. ValueError if nobody can be called. `look`
    is asked, with the store's holder, until it says that it need not be waited for.
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
    address = addresses[holder] or link.ways.get((holder, 0))
    if own == holder:
        address = f"{_host_of_own(settings, master)}:{settings.port}"
    if own == holder and rank_info.rank == 0:
        callers = rank_info.num_clusters * rank_info.world_size
        streams = settings.streams + 1
        make_room(streams * callers, f"{streams} connections of each of {callers} ranks")
        link.serve(Shelf().serve)
    else:
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
    return LinkStore(link, (holder, 0))


def _host_of_own(settings: LinkSettings, master: str) -> str:
    """Return where the own cluster's ranks call its first one: there it listens, or everywhere."""
    host = settings.listens_at
    if host in ("0.0.0.0", "::"):
        return master
    return bracketed(host)


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


def say_where(store: dist.Store, link: Link, where: Where) -> None:
    """Tell where this rank's link can be called."""
    said = {**asdict(where), "incarnation": link.incarnation}
    store.set(_key(link.cluster_id, link.rank), json.dumps(said))


def connect_peers(
    store: dist.Store, link: Link, clusters: Sequence[int], deadline_seconds: float
) -> dict[int, int]:
    """Connect to the ranks with this one's number in other clusters; PeerLost names who is not.

    Returns the incarnations of all, the own one with them, by cluster.

    The later cluster calls the earlier one, unless that one can only call.
    """
    addresses: dict[int, str | None] = {}
    incarnations: dict[int, int] = {}
    told = _where_all_are(store, sorted({*clusters, link.cluster_id}), link.rank, deadline_seconds)
    for cluster, where in told.items():
        addresses[cluster] = where["address"]
        incarnations[cluster] = where["incarnation"]
        if cluster != link.cluster_id:
            address = address_to_call(link.cluster_id, cluster, addresses)
            if address is None and cluster < link.cluster_id:
                address = link.ways.get((cluster, link.rank))
            link.expect(cluster, link.rank, address, where["incarnation"], where["slot"])
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
    return incarnations


def _where_all_are(
    store: dist.Store, clusters: Sequence[int], rank: int, deadline_seconds: float
) -> dict[int, dict[str, Any]]:
    """Return what ranks of this number have said, by cluster; PeerLost names the first who is not.

    However many clusters there are, it is asked for them twice.
    """
    keys = [_key(cluster, rank) for cluster in clusters]
    shown = [f"where rank {rank} of cluster {cluster} can be called" for cluster in clusters]
    try:
        with waiting_for(shown[0] if len(shown) == 1 else f"where ranks {rank} can be called",
                         deadline_seconds):  # fmt: skip
            store.wait(keys, timedelta(seconds=deadline_seconds))
        return dict(zip(clusters, map(json.loads, store.multi_get(keys)), strict=True))
    except RuntimeError as error:
        try:
            what = next(text for k, text in zip(keys, shown, strict=True) if not store.check([k]))
        except (StopIteration, RuntimeError):
            what = shown[0]
        raise PeerLost(f"{what}: {str(error).splitlines()[0]}") from error


def address_to_call(own: int, other: int, addresses: Mapping[int, str | None]) -> str | None:
    """Return where to call another cluster; None if it calls. All before it have said theirs."""
    if other > own:
        return addresses[other] if addresses[own] is None else None
    return addresses[other]


def _key(cluster: int, rank: int) -> str:
    return f"link/{cluster}/{rank}"
