"""`dsx rendezvous`: a meeting point of the clusters that none of them owns."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Annotated

import typer


def rendezvous(
    port: Annotated[int, typer.Option(help="TCP port to listen on; 0 picks a free one.")] = 29400,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
) -> None:
    """Hold the clusters' meeting point, so that none of them owns it.

    Use it with "clusters": {"rendezvous": "tcp://HOST:PORT", "store": "standalone"}. Ctrl-C ends
    it.
    """
    import torch.distributed as dist

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the store's threads inherit the mask
    try:
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
    except RuntimeError as error:
        typer.echo(f"cannot listen on {host}:{port}: {str(error).splitlines()[0]}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"rendezvous store listening on {host}:{store.port}; Ctrl-C ends it")
    received = signal.sigwait(ends)
    typer.echo(f"{signal.Signals(received).name}: closed")
