"""torch's key-value store: hosting one, at a port that may have to be waited for, or connecting.

What was killed a moment ago may still hold its port for some seconds, through processes that end
after it. A host therefore tries again until the deadline, and says so once.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta

import torch.distributed as dist

from dsx.comm.sockets import opened_here
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_RETRY_SECONDS = 0.2
_MOST_SECONDS = 60.0  # that a port is waited for: longer than anything killed holds one
_CONNECTION_SECONDS = 60.0
_SILENT_SECONDS = 10.0
logger = logging.getLogger(__name__)


def open_store(
    host: str,
    port: int,
    *,
    is_host: bool,
    deadline_seconds: float,
    look_at_holder: Callable[[], None] | None = None,
) -> dist.TCPStore:
    """Connect to the store, or host it; PeerLost if nobody answers within the deadline.

    A host waits for its port for a minute at most, RuntimeError after it. `look_at_holder` is
    called where the port is in use, to raise another error if who holds it is known.
    """
    with waiting_for(f"the rendezvous store at {host}:{port}", deadline_seconds):
        if is_host and port:
            _await_port(host, port, min(deadline_seconds, _MOST_SECONDS), look_at_holder)
        says_so = threading.Timer(_SILENT_SECONDS, _tell_of_waiting, (host, port, deadline_seconds))
        says_so.daemon = True
        says_so.start()
        try:
            with opened_here([port]):
                return dist.TCPStore(
                    host,
                    port,
                    is_master=is_host,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=deadline_seconds),
                )
        except RuntimeError as error:
            if is_host:
                raise _cannot_listen(host, port, str(error).splitlines()[0]) from error
            raise PeerLost(
                f"no rendezvous store answered at {host}:{port} within {deadline_seconds:g} s "
                "(clusters.join_deadline_seconds): start cluster 0, or `dsx rendezvous`, and check "
                "that this host can reach that port"
            ) from error
        finally:
            says_so.cancel()


def _tell_of_waiting(host: str, port: int, deadline_seconds: float) -> None:
    logger.warning(
        "waiting for the rendezvous store at %s:%d, up to %g s (clusters.join_deadline_seconds): "
        "it is there once cluster 0 or `dsx rendezvous` has started",
        host, port, deadline_seconds,
    )  # fmt: skip


def another_connection(store: dist.Store) -> dist.Store:
    """Return one more connection to a store, for another thread: one at a time waits on each."""
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        return store  # of another kind, as in tests
    return open_store(host, port, is_host=False, deadline_seconds=_CONNECTION_SECONDS)


def _await_port(
    host: str, port: int, deadline_seconds: float, look_at_holder: Callable[[], None] | None
) -> None:
    """Return once the port can be listened on, as the store will: at all addresses."""
    until, has_told = time.monotonic() + deadline_seconds, False
    while (why := _why_taken(port)) is not None:
        if time.monotonic() >= until:
            raise _cannot_listen(host, port, f"{why}, for {deadline_seconds:g} s")
        if not has_told:
            has_told = True
            logger.warning(
                "port %d is in use: trying again for up to %g s; what was killed a moment ago may "
                "still hold it", port, deadline_seconds,
            )  # fmt: skip
            if look_at_holder is not None:
                look_at_holder()
        time.sleep(_RETRY_SECONDS)


def _why_taken(port: int) -> str | None:
    """Return why nobody can listen on a port; None if one can."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        with closing(socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)):
            return None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            with suppress(OSError), closing(socket.create_server(("", port))):
                return None  # no IPv6 after all
        return error.strerror or str(error)


def _cannot_listen(host: str, port: int, why: str) -> RuntimeError:
    return RuntimeError(
        f"cannot listen on {host}:{port} for the rendezvous store: {why}; choose a free port"
    )
