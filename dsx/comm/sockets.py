"""The TCP sockets that dsx has opened, through torch, which does not tell of them.

They are wanted in two places. A transport that closes while a peer is silent shuts its own down, so
that no thread waits out a deadline. And a child that is forked, as data workers are, inherits all
of them: it would hold a port, and keep the line to another cluster open, when this process has
ended. There the numbers are made to stand for /dev/null, and closed by whoever holds them.

Known by looking at what is open before and after, and at its ports, for another thread may open
what is none of ours; where there is no /proc, by nobody: threads that wait are then left to the end
of the process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_owned: dict[int, str] = {}  # by descriptor, what it was when it was ours


class Sockets:
    """Those opened in one `opened_here` context."""

    def __init__(self) -> None:
        self._links: dict[int, str] = {}

    def add(self, links: dict[int, str]) -> None:
        """Take these descriptors, for what they are now."""
        self._links |= links
        _owned.update(links)

    def __len__(self) -> int:
        return len(self._links)

    def shut_down(self) -> None:
        """End all connections at once, for both sides; whoever waits on one gets an error."""
        for number, link in self._links.items():
            if _link(number) == link:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """No longer hold them for ours; they have been closed."""
        for number in self._links:
            _owned.pop(number, None)
        self._links.clear()


@contextmanager
def opened_here(ports: Collection[int]) -> Generator[Sockets, None, None]:
    """Note the TCP sockets that are opened meanwhile, in the object that it yields.

    Those alone that have one of these `ports`, which are looked at in the end, at either side.
    """
    before, sockets = _links(), Sockets()
    try:
        yield sockets
    finally:
        fresh = {number: link for number, link in _links().items() if before.get(number) != link}
        sockets.add({number: link for number, link in fresh.items() if _ports(number) & {*ports}})


def listening_since(before: Collection[int]) -> dict[int, str]:
    """Return where this process listens: addresses by port, without the ports of `before`."""
    found = [place for number in _links() if (place := _listens_on(number))]
    return {port: address for port, address in found if port not in before}


def let_go_in_child() -> None:
    """Let a forked child hold none of them; the descriptors stay taken, as objects close them."""
    ours = [number for number, link in _owned.items() if _link(number) == link]
    _owned.clear()
    if ours:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in ours:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


def _links() -> dict[int, str]:
    """Return the sockets of this process: by descriptor, kind and number."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return {}
    links = {number: _link(number) for number in numbers}
    return {number: link for number, link in links.items() if link.startswith("socket:")}


def _link(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _ports(number: int) -> set[int]:
    """Return the ports of a TCP socket, its own and that of its peer; none of another thing."""
    ports: set[int] = set()
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        if copy.family in _INTERNET and copy.type == socket.SOCK_STREAM:
            ports.add(copy.getsockname()[1])
            ports.add(copy.getpeername()[1])
    return ports


def _listens_on(number: int) -> tuple[int, str] | None:
    """Return port and address that a TCP socket listens on, None if it does not."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        if copy.family in _INTERNET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            address, port, *_ = copy.getsockname()
            return port, address
    return None


os.register_at_fork(after_in_child=let_go_in_child)
