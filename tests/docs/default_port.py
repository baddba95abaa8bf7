"""Launchers meet at port 29500 unless told otherwise, and pages do not tell them otherwise."""

from __future__ import annotations

import socket
import time

_PORT = 29500
_LAUNCHES = ("deepspeed ", "torchrun ", "bash scripts/quickstart.sh", "dsx quickstart")
_POLL_SECONDS = 0.5


def wait_for_port(command: str, deadline_seconds: float = 300) -> None:
    """Before a command that launches ranks: wait until no other run of this host has the port."""
    if not command.startswith(_LAUNCHES) or "--master_port" in command:
        return
    until = time.monotonic() + deadline_seconds
    while not _is_free():
        assert time.monotonic() < until, f"port {_PORT} is taken by another run: let it end"
        time.sleep(_POLL_SECONDS)


def _is_free() -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _PORT))
        except OSError:
            return False
    return True
