"""Ports of this host's loopback that nobody has now.

Imports nothing of dsx.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from threading import Lock

_LOW = range(12_000, 32_000)  # those that the system gives away by itself are above 32,768
_places = itertools.count(os.getpid() % 997 * 10)  # in them: no two calls of a process get one
_turn = Lock()


def free_ports(count: int) -> list[int]:
    """Return so many, all different: none is let go before the last one is found."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def free_low_ports(count: int) -> list[int]:
    """Return so many that nobody listens on, below those that connections get from the system.

    For what listens later, beside others that connect meanwhile; none is given twice before all
    have been. RuntimeError if there are not so many.
    """
    found: list[int] = []
    with _turn:
        for place in itertools.islice(_places, len(_LOW)):
            port = _LOW[place % len(_LOW)]
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports between {_LOW.start} and {_LOW.stop}")
