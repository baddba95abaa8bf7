"""Connections between clusters as a run makes them, one process each, over gloo or over links."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dsx.comm.address import parse_address
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.comm.links.extra import require_extra
from dsx.comm.links.settings import LinkSettings
from dsx.comm.store import open_store
from dsx.comm.topology import RankInfo
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost

if TYPE_CHECKING:
    from dsx.comm.links.host_port import Where
    from dsx.comm.links.link import Link


@dataclass(frozen=True)
class OwnLink:
    """A process's link, and where it is called."""

    link: Link
    where: Where

    def close(self) -> None:
        """End it."""
        self.link.close()


@dataclass(frozen=True)
class Way:
    """How clusters reach each other: at `rendezvous`, "tcp://HOST:PORT", or by links."""

    rendezvous: str | None
    link: LinkSettings | None = None
    interface: str | None = None

    @property
    def transport(self) -> str:
        """What moves messages: "gloo" or "link"."""
        return "gloo" if self.link is None else "link"

    @property
    def security(self) -> str:
        """Of the link: "none" or "curve"."""
        return "none" if self.link is None else self.link.security

    def meet(
        self, rank_info: RankInfo, deadline_seconds: float
    ) -> tuple[dist.Store, OwnLink | None]:
        """Return the store that all meet at, and this rank's link; PeerLost if nobody answers."""
        if self.link is None:
            assert self.rendezvous is not None
            host, port = parse_address(self.rendezvous)
            is_host = rank_info.cluster_id == 0
            store = open_store(host, port, is_host=is_host, deadline_seconds=deadline_seconds)
            return store, None
        require_extra()
        from dsx.comm.links.host_port import open_on_host
        from dsx.comm.links.meeting import open_meeting

        link, where = open_on_host(
            self.link, rank_info, None, "127.0.0.1", deadline_seconds, self.interface
        )
        store = open_meeting(self.link, rank_info, link, deadline_seconds)
        return store, OwnLink(link, where)

    def connect(
        self, store: dist.Store, own: OwnLink | None, name: str, seat: Seat, streams: int,
        deadline_seconds: float,
    ) -> list[Any]:  # fmt: skip
        """Return groups to send by, one per gloo connection; a link's own share one. PeerLost."""
        if own is None:
            try:
                return connect_gloo(
                    dist.PrefixStore(name, store), seat, timedelta(seconds=deadline_seconds),
                    open_device(self.interface), streams,
                )  # fmt: skip
            except PeerLost:
                raise
            except RuntimeError as error:
                raise _not_connected(seat, deadline_seconds, error) from error
        from dsx.comm.links.group import LinkGroup
        from dsx.comm.links.meeting import meet_peers, wait_for_peers

        assert self.link is not None
        alone = RankInfo(seat.cluster_id, seat.num_clusters, 0, 1)
        streams = self.link.streams
        meet_peers(store, None, own.link, own.where, alone, deadline_seconds, streams)
        wait_for_peers(own.link, [seat.ids[m] for m in seat.others], deadline_seconds)
        return [LinkGroup(own.link, name, seat)]


def _not_connected(seat: Seat, deadline_seconds: float, error: RuntimeError) -> PeerLost:
    return PeerLost(
        f"cluster {seat.cluster_id} cannot connect to cluster(s) "
        f"{[seat.ids[m] for m in seat.others]} within "
        f"{deadline_seconds:g} s: {str(error).splitlines()[0]}; the hosts must reach "
        "each other on all TCP ports, over the interface that --interface names"
    )
