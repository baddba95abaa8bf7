"""`dsx relay`: where sites meet that can only call out.

dsx relay --keys keys --port 29500
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.comm.address import bracketed
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.comm.links.relay import Relay

_COUNT_SECONDS = 60.0


@one_line_errors("relay", ModuleNotFoundError)
def relay(
    keys: Annotated[
        str, typer.Option("--keys", metavar="DIR", help="The folder with members/; no secret.")
    ] = "keys",
    port: Annotated[
        int, typer.Option(help="TCP port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 29500,
    host: Annotated[str, typer.Option(help="Address to listen on; :: for all of both.")] = "::",
    mbit: Annotated[
        float | None, typer.Option(help="Mbit/s that it sends at most, all together.", min=0.01)
    ] = None,
    most_connections: Annotated[
        int, typer.Option(help="Calls that it holds at once.", min=1, max=100_000)
    ] = 2048,
) -> None:
    """Join sites that can only call out: it forwards what it cannot read.

    Sites register with their members' keys, of which it needs the public ones alone: `dsx keys add`
    each of them. Ctrl-C ends it.
    """
    from dsx.comm.links.entrance import Limits
    from dsx.comm.links.event_loop import EventLoop
    from dsx.comm.links.relay import Relay
    from dsx.comm.links.tcp import listen
    from dsx.comm.open_files import raise_file_limit

    limits = Limits(most_connections=most_connections)
    raise_file_limit(limits.most_files, f"--most-connections {most_connections}")
    loop = EventLoop()
    listener = listen(host, port, None)
    ended: list[int] = []

    def end(number: int, frame: object) -> None:
        ended.append(number)
        loop.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    serving = Relay(loop, listener, Path(keys), limits, typer.echo)
    serving.bucket.set_rate(None if mbit is None else mbit * 1e6 / 8)
    members = ", ".join(serving.members) or "nobody yet"
    where = f"{bracketed(host)}:{listener.getsockname()[1]}"
    typer.echo(f"relay listening on {where} for {members}; Ctrl-C ends it")
    _count(loop.after, serving, "")
    loop.run()
    serving.close()
    typer.echo(f"{signal.Signals(ended[0]).name}: closed")


def _count(after: object, serving: Relay, told: str) -> None:
    """Say now and then what there is, if it has changed."""
    registered = ", ".join(f"{m} ({n} ranks)" for m, n in sorted(serving.registered.items()))
    text = (
        f"registered: {registered or 'nobody'}; joined: {serving.num_joined} now, "
        f"{serving.num_joined_ever} in all; refused: {sum(serving.refused.values())}"
    )
    if told and text != told:
        typer.echo(text)
        for why, num in serving.refused.most_common(5):
            typer.echo(f"  refused {num}: {why}")
    after(_COUNT_SECONDS, lambda: _count(after, serving, text))  # type: ignore[operator]
