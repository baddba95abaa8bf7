"""`dsx rendezvous`: a meeting point of the clusters that none of them owns."""

from __future__ import annotations

import signal
import socket
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors


@one_line_errors("rendezvous", RuntimeError)
def rendezvous(
    port: Annotated[
        int, typer.Option(help="TCP port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 29400,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
) -> None:
    """Hold the clusters' meeting point, so that none of them owns it.

    Use it with "clusters": {"rendezvous": "tcp://HOST:PORT", "store": "standalone"}. Ctrl-C ends
    it.
    """
    from dsx.comm.open_files import take_all_room
    from dsx.comm.store import open_store

    take_all_room()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the store's threads inherit the mask
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()  # the store would wait a minute
    except (OSError, UnicodeError) as error:  # the latter for what can be no name of a host
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"cannot listen on {host}:{port}: {reason}; give a free --port, and as --host "
            "an address of this host"
        ) from error
    store = open_store(host, port, is_host=True, deadline_seconds=30)
    typer.echo(f"rendezvous store listening on {host}:{store.port}; Ctrl-C ends it")
    received = signal.sigwait(ends)
    typer.echo(f"{signal.Signals(received).name}: closed")
