"""Links of one process, joined with keys of their own, and a line between them that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.utils import z85

from dsx.comm.links.group import LinkGroup
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.core.membership import Seat

SOON = timedelta(seconds=20)


class KnownKeys:
    """Everybody's public keys, and one's own; `public` may be changed while a link runs."""

    def __init__(self, own: int, pairs: dict[int, tuple[bytes, bytes]]) -> None:
        self.public_key, self.secret_key = pairs[own]
        self.public = {cluster: [public] for cluster, (public, _) in pairs.items()}
        self._changed: set[int] = set()

    def cluster_of(self, public_key: bytes) -> int | None:
        """Return whose key it is."""
        text = z85.encode(public_key)
        return next((cluster for cluster, keys in self.public.items() if text in keys), None)

    def keys_of(self, cluster_id: int) -> list[bytes]:
        """Return a cluster's keys."""
        return self.public.get(cluster_id, [])

    def change(self, cluster_id: int, keys: list[bytes]) -> None:
        """Replace a cluster's keys."""
        self.public[cluster_id] = keys
        self._changed.add(cluster_id)

    def reload(self) -> set[int]:
        """Return what `change` has changed."""
        changed, self._changed = self._changed, set()
        return changed


def pairs_of(count: int) -> dict[int, tuple[bytes, bytes]]:
    """Return a pair of keys for each cluster."""
    return {cluster: zmq.curve_keypair() for cluster in range(count)}


class Line:
    """A TCP line to a port: `cut` resets all its connections, `is_open` says if new ones come."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self.is_open = True
        self.flows = threading.Event()  # else nobody reads what is sent
        self.flows.set()
        self.passed = bytearray()  # what has gone over it, both ways
        self.said: list[bytearray] = []  # by those who have called, each connection's
        self.garbles = 0  # of how much that is said there one bit is changed
        self.swallows: Callable[[int, bool], bool] = lambda number, is_caller: False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset what stands."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                linger = b"\x01\0\0\0\0\0\0\0"
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Take no more, and reset what stands."""
        self.is_open = False
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.is_open:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # nobody is there yet
                    near.close()
                    continue
                self._ends += [near, far]
                number = len(self.said)
                self.said.append(bytearray())
                for way in ((near, far, self.said[-1]), (far, near, bytearray())):
                    args = (*way, number, way[0] is near)
                    threading.Thread(target=self._pass, args=args, daemon=True).start()

    def _pass(
        self,
        source: socket.socket,
        sink: socket.socket,
        said: bytearray,
        number: int,
        is_caller: bool,
    ) -> None:
        """Hand on; what the `number`-th connection `swallows`, of caller or called, is let go."""
        with contextlib.suppress(OSError):
            while self.flows.wait() and (data := source.recv(1 << 16)):
                if self.swallows(number, is_caller):
                    continue
                if len(self.passed) < 1 << 24:
                    self.passed += data
                    said += data
                if self.garbles and not is_caller:
                    self.garbles -= 1
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def two_links(
    keys: list[KnownKeys] | None = None, over_line: bool = False, **options: Any
) -> Generator[tuple[list[Link], Line | None]]:
    """Yield the links of two clusters that have met; with keys of their own by default."""
    if keys is None:
        pairs = pairs_of(2)
        keys = [KnownKeys(m, pairs) for m in range(2)]
    links = [Link(m, 0, keys[m], LinkOptions(**options)) for m in range(2)]
    line = Line(links[0].port) if over_line else None
    try:
        links[0].expect(1, 0, None)
        links[1].expect(0, 0, line.address if line else f"127.0.0.1:{links[0].port}")
        for m in range(2):
            links[m].wait_for(1 - m, 0, 20)
        yield links, line
    finally:
        for link in links:
            link.close()
        if line is not None:
            line.close()


def groups_of(links: list[Link], name: str = "a lane") -> list[LinkGroup]:
    """Return both ends of a lane."""
    return [LinkGroup(link, name, Seat.of(m, 2)) for m, link in enumerate(links)]


def swap(groups: list[LinkGroup], num_bytes: int, tag: int = 0) -> list[Any]:
    """Post a message each way; return what waits for them and checks them."""
    made = [torch.randint(0, 256, (num_bytes,), dtype=torch.uint8) for _ in groups]
    places = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in groups]
    works: list[tuple[Any, Tensor, Tensor]] = []
    for m, group in enumerate(groups):
        works.append((group.recv([places[m]], 1 - m, tag), places[m], made[1 - m]))
        works.append((group.send([made[m]], 1 - m, tag), made[m], made[m]))
    return works


def check(works: list[Any]) -> None:
    """Wait for what `swap` has posted; what came is what was sent."""
    for work, _, _ in works:
        work.wait(SOON)
    for _, got, expected in works:
        assert torch.equal(got, expected)
