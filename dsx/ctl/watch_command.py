"""`dsx watch`: a live page of a run, from its folder or over its links."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP

if TYPE_CHECKING:
    from dsx.telemetry.watch.run import WatchedRun

Join = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="Instead: a cluster's link; more by commas."),
]
KeysFolder = Annotated[Path, typer.Option(metavar="FOLDER", help="With --join: a member's keys.")]
Name = Annotated[str | None, typer.Option(help="With --join: whose key, where FOLDER has several.")]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="With --join: keep what is copied there."),
]
Seconds = Annotated[
    float, typer.Option(help="With --join: how long to look for one.", min=0.5, max=600.0)
]


@one_line_errors("watch", ModuleNotFoundError)
def watch(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help=RUN_HELP)] = None,
    join: Join = None,
    keys: KeysFolder = Path("keys"),
    name: Name = None,
    directory: Directory = None,
    seconds: Seconds = 10.0,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run, drawn beside this one.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Where the page is served; 0: any that is free.", min=0, max=65535)
    ] = 8765,
    host: Annotated[
        str,
        typer.Option(help="The address it is served at; beside loopback ones, with a token."),
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token at a loopback address, too.")
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open it in a browser.")
    ] = True,
) -> None:
    """Show a run on a live page, while it goes on and afterwards.

    RUN may come later: the page waits for it. What it shows is what the clusters write into the
    run's folder; it changes nothing. With --join it follows a run over its secured links, from a
    host that has a member's key and no folder of the run. Ctrl-C ends it.
    """
    from dsx.method.alarms import BOUNDS
    from dsx.telemetry.watch.run import WatchedRun
    from dsx.telemetry.watch.watch import watch as serve

    alarms = {bound.kind for bound in BOUNDS}

    def say(text: str) -> None:
        typer.echo(f"dsx watch: {text}")

    if (run is None) == (join is None):
        raise ValueError(
            "give RUN, the run's folder, or --join HOST:PORT, a cluster's link, and not both"
        )
    other = None if against is None else WatchedRun(against)
    if run is not None:
        if directory is not None or name is not None:
            raise ValueError("--dir and --name are for --join HOST:PORT: leave them out with RUN")
        serve(WatchedRun(run), other, (host, port), browser, token, say, alarms=alarms)
        return
    with _joined(join or [], keys, name, directory, seconds) as (watched, what):
        serve(watched, other, (host, port), browser, token, say, what, alarms)


@contextlib.contextmanager
def _joined(
    places: list[str], keys: Path, name: str | None, directory: Path | None, seconds: float
) -> Generator[tuple[WatchedRun, str]]:
    """Follow a run over its links; yield it, and what is watched in words."""
    from dsx.comm.address import link_address
    from dsx.comm.links.extra import require_extra

    require_extra()
    from dsx.comm.links.keys import Keys
    from dsx.ctl.joined import Joined, NobodyAnswers
    from dsx.ctl.mirror import mirror_folder
    from dsx.telemetry.watch.run import WatchedRun

    addresses = [link_address(one) for place in places for one in place.split(",") if one]
    whose = _whose_key(keys) if name is None else name
    Keys.load(keys, whose)  # what is wrong with them is said at once
    with contextlib.ExitStack() as stack:
        if directory is None:
            _end_in_order()
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsx_watch_"))
            directory = Path(made) / addresses[0].replace(":", "_").strip("[]")
        watched = WatchedRun(mirror_folder(directory))

        def tell(who: str, why: str) -> None:
            text = f"{who} does not answer: {why}" if why else f"{who} answers"
            typer.echo(f"dsx watch: {text}", err=True)
            watched.tell(f"link: {who}", text if why else "")

        joined = Joined(lambda: Keys.load(keys, whose), addresses, directory, tell, seconds)
        stack.callback(joined.close)
        try:
            joined.wait(seconds)
        except NobodyAnswers as error:
            typer.echo(f"dsx watch: {error}", err=True)
            raise typer.Exit(1) from error
        yield watched, f"the run of {', '.join(addresses)}, as {whose},"


def _whose_key(keys: Path) -> str:
    """Return the one member whose secret is in a folder; ValueError if there are more, or none."""
    held = sorted(path.stem for path in keys.glob("*.secret"))
    if len(held) == 1:
        return held[0]
    whose = f"the secrets of {', '.join(held)}: say --name NAME" if held else (
        "no NAME.secret: give --keys FOLDER, that of `dsx keys`"
    )  # fmt: skip
    raise ValueError(f"--keys {keys} holds {whose}")


def _end_in_order() -> None:
    """Have SIGTERM end this process as Ctrl-C does: what was copied is removed."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    with contextlib.suppress(ValueError):  # another thread's, as in a test
        signal.signal(signal.SIGTERM, end)
