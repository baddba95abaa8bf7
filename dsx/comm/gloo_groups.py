"""Where gloo listens, and groups of it that torch knows nothing of: one member per cluster."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from dsx.comm.gather import Gathers
from dsx.comm.gloo_device import gloo_device
from dsx.comm.open_files import make_room
from dsx.comm.peer_store import PeerStore
from dsx.comm.reach import require_reach
from dsx.comm.sockets import listening_since
from dsx.core.membership import Seat

_GLOO_ATTEMPTS = 5  # at each connection of a group
_FIRST_TAG = 1 << 29  # of the exchanges of addresses, below that of a transport's own gathers


class Device:
    """A gloo device: a thread that serves sockets.

    It wakes up 100 times a second whether or not there is anything, so a rank needs one, not one
    per group: a dozen slowed a core that trains by 2 %. `ports` are where it listens, and those of
    the peers that have connected; 0 stands for one that is not known.
    """

    def __init__(self, interface: str | None) -> None:
        before = listening_since(())
        self.handle = gloo_device(interface, is_lazy=False)  # whatever TORCH_GLOO_LAZY_INIT says
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

    def hear(self, store: dist.Store, seat: Seat, deadline: timedelta) -> None:
        """Wait until all peers have told it, and take it."""
        if keys := [f"listens/{peer}" for peer in seat.others]:
            store.wait(keys, deadline)
            self.ports |= {*map(int, store.multi_get(keys))} - {0}


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
    device.require_reach(store, seat, deadline)
    device.tell(store, seat)
    device.hear(store, seat, deadline)  # who is late is so here, where the whole deadline is
    return _groups(store, seat, deadline, device, streams)


def _groups(
    store: dist.Store, seat: Seat, deadline: timedelta, device: Device, streams: int
) -> list[Any]:
    """Connect peers that have said that they are here.

    gloo calls one that does not answer five times, each for as long as its timeout: within the
    deadline all together. That timeout is nothing later: every wait for a message has its own.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
    options._timeout = deadline / _GLOO_ATTEMPTS
    options._threads = 1  # for collectives, of which there are none
    options._devices = [device.handle]
    return [
        dist.ProcessGroupGloo(
            dist.PrefixStore(f"stream_{k}", store), seat.position, seat.num_clusters, options
        )
        for k in range(streams)
    ]


class GlooConnections:
    """Makes the groups of one transport, one set of connections after another.

    The first is made where clusters have met, in the key space `store`. Later ones find each other
    over that one: what the store is asked does not grow with the number of fragments.
    """

    def __init__(
        self,
        store: dist.Store,
        seat: Seat,
        deadline: timedelta,
        device: Device,
        num_groups: int,
    ) -> None:
        """`num_groups` are all that will be made; ValueError if this process may not have them."""
        self._store, self._seat, self._deadline, self._device = store, seat, deadline, device
        self._gathers: Gathers | None = None
        self._found: list[PeerStore] = []  # gloo keeps no reference to the Python half of one
        peers = len(seat.others)
        make_room(num_groups * peers, f"{num_groups} connections to each of {peers} clusters")

    def connect(self, what: str, streams: int) -> list[Any]:
        """Return one group per stream; errors as of `connect_gloo`."""
        seat, deadline, device = self._seat, self._deadline, self._device
        if self._gathers is None:
            groups = connect_gloo(self._store, seat, deadline, device, streams)
            seconds = deadline.total_seconds()
            self._gathers = Gathers(
                groups[0], seat, seconds, None, _FIRST_TAG, "clusters.join_deadline_seconds"
            )
            return groups
        exchange = partial(self._gathers.exchange, f"connections of the {what}")
        self._found.append(PeerStore(exchange))
        return _groups(self._found[-1], seat, deadline, device, streams)
