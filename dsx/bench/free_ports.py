"""Ports of this host's loopback that nobody has now.

Imports nothing of dsx.
"""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Return so many, all different: none is let go before the last one is found."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]
