"""Where gloo listens, and groups of it that torch knows nothing of: one member per cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsx.comm.reach import require_reach
from dsx.comm.sockets import listening_since
from dsx.core.membership import Seat


class Device:
    """A gloo device: a thread that serves sockets.

    It wakes up 100 times a second whether or not there is anything, so a rank needs one, not one
    per group: a dozen slowed a core that trains by 2 %. `ports` are where it listens, and those of
    the peers that have connected; 0 stands for one that is not known.
    """

    def __init__(self, interface: str | None) -> None:
        before = listening_since(())
        make: Any = dist.ProcessGroupGloo
        is_default = interface is None
        self.handle: Any = (
            make.create_default_device() if is_default else make.create_device(interface=interface)
        )
        opened = listening_since(before)
        self.own_port, self.address = opened.popitem() if len(opened) == 1 else (0, "")
        self.ports = {self.own_port} - {0}
        self.interface = interface
        self._is_reached = False

    def require_reach(self, store: dist.Store, seat: Seat, deadline: timedelta) -> None:
        """Look once whether all peers lead here, and theirs to them; PeerLost if one does not."""
        if not self._is_reached:
            require_reach(store, seat, self.address, self.interface, deadline)
        self._is_reached = True

    def tell(self, store: dist.Store, seat: Seat) -> None:
        """Tell the peers where this one listens; before connecting."""
        store.set(f"listens/{seat.position}", str(self.own_port))

    def hear(self, store: dist.Store, seat: Seat) -> None:
        """Take what the peers have told; once connected."""
        told = {int(store.get(f"listens/{peer}")) for peer in seat.others}
        self.ports |= told - {0}


def open_device(interface: str | None) -> Device:
    """Return a device on an interface, or on the host name's."""
    return Device(interface)


def connect_gloo(
    store: dist.Store, seat: Seat, deadline: timedelta, device: Device, streams: int = 1
) -> list[Any]:
    """Build unregistered gloo groups over `store`: one member per cluster, fully connected.

    A cluster's rank in them is its position in the membership.
    `device` is `open_device`'s. PeerLost names a peer whose address does not lead to it;
    RuntimeError from gloo if one does not come within `deadline`.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
    options._timeout = deadline
    options._threads = 1  # for collectives, of which there are none
    options._devices = [device.handle]
    device.require_reach(store, seat, deadline)
    device.tell(store, seat)
    groups = [
        dist.ProcessGroupGloo(
            dist.PrefixStore(f"stream_{k}", store), seat.position, seat.num_clusters, options
        )
        for k in range(streams)
    ]
    device.hear(store, seat)
    return groups
