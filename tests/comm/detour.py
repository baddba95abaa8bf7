"""A way between two clusters that leads through a relay (relay.py), for gloo's own connections."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

RELAY = Path(__file__).with_name("relay.py")
LOOPBACK = socket.inet_aton("127.0.0.1")


class Detour(dist.Store):
    """A store in which cluster 0's gloo address is that of a relay, and cluster 1's beyond it.

    Of two addresses gloo has the greater one connect, by host, then by port as it lies in memory:
    the same side for both clusters only if what they see of each other is in the same order.
    """

    def __init__(
        self, store: dist.Store, cluster: int, latency: float, bytes_per_second: float = 0.0
    ) -> None:
        super().__init__()
        self._store: Any = store
        self._cluster = cluster
        self._limits = [f"{latency}", f"{bytes_per_second}"]
        self._relay: subprocess.Popen[str] | None = None

    def set(self, key: str, value: bytes | str) -> None:  # pyright: ignore
        if isinstance(value, str) or LOOPBACK not in value:
            self._store.set(key, value)  # no address of gloo's
            return
        at = value.index(LOOPBACK)  # behind the port, in a sockaddr_in
        host, port = socket.inet_aton("127.255.0.1"), value[at - 2 : at]
        if self._cluster == 0:
            command = [sys.executable, str(RELAY), str(int.from_bytes(port, "big")), *self._limits]
            self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._relay.stdout is not None
            host, port = LOOPBACK, int(self._relay.stdout.readline()).to_bytes(2, "big")
        self._store.set(key, value[: at - 2] + port + host + value[at + 4 :])

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, *arguments: Any) -> None:  # pyright: ignore
        self._store.wait(*arguments)

    def close(self) -> None:
        """End the relay, if this side started it."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
