"""`dsx ctl`: look at a run that goes on, and tell it what to do, from any host with a member's key.

Exit status: 0, 1 where nobody answers or what was asked for is not done, 2 for what cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.settings import LinkSettings
    from dsx.ctl.visit import Visit

app = typer.Typer(
    no_args_is_help=True,
    help="Look at a run that goes on, and tell it what to do: over its links, with a member's key.",
)
Config = Annotated[str, typer.Argument(metavar="CONFIG", help='The run\'s JSON, with "link".')]
OwnId = Annotated[
    int | None,
    typer.Option(help="Whose key to use; default: that of the config, or of the folder of keys."),
]
Seconds = Annotated[
    float, typer.Option(help="How long to look for a cluster that answers.", min=0.5, max=600.0)
]
Wait = Annotated[
    float, typer.Option(help="How long to wait until all have done it.", min=1.0, max=1e6)
]


@app.command()
@one_line_errors("ctl status", ModuleNotFoundError)
def status(
    config: Config,
    cluster_id: OwnId = None,
    seconds: Seconds = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say who trains, where each cluster is, who leads, and what is under way. Changes nothing."""
    from rich.console import Console

    from dsx.ctl.show import headline, status_table

    with _visiting("status", config, cluster_id, seconds) as (visit, link):
        answers = visit.ask("status")
    if as_json:
        clusters = {str(id): {"name": link.names[id], **told} for id, told in answers.items()}
        typer.echo(json.dumps({"asked": visit.met, "clusters": clusters}, indent=2))
        return
    console = Console(highlight=False, markup=False)
    console.print(headline(answers, visit.met, link.names), soft_wrap=True)
    console.print(status_table(answers, visit.met, link.names))


@app.command()
@one_line_errors("ctl save", ModuleNotFoundError)
def save(
    config: Config, cluster_id: OwnId = None, seconds: Seconds = 10.0, wait: Wait = 3600.0
) -> None:
    """Have all clusters save at one step, and go on."""
    _give("save", config, cluster_id, seconds, wait, ends=False)


@app.command()
@one_line_errors("ctl stop", ModuleNotFoundError)
def stop(
    config: Config, cluster_id: OwnId = None, seconds: Seconds = 10.0, wait: Wait = 3600.0
) -> None:
    """Have all clusters save at one step, and end with exit status 0."""
    _give("stop", config, cluster_id, seconds, wait, ends=True)


@app.command("set")
@one_line_errors("ctl set", ModuleNotFoundError)
def set_(
    config: Config,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Such as outer_optimizer.lr.")],
    value: Annotated[float, typer.Argument(metavar="VALUE", help="What it is from then on.")],
    cluster_id: OwnId = None,
    seconds: Seconds = 10.0,
    wait: Wait = 3600.0,
) -> None:
    """Change H, the outer rate or momentum, or the line's rate, for all clusters at one step."""
    _give("set", config, cluster_id, seconds, wait, ends=False, key=key, value=value)


@app.command()
@one_line_errors("ctl leave", ModuleNotFoundError)
def leave(
    config: Config,
    cluster: Annotated[int, typer.Option(help="The cluster that is to leave.")],
    cluster_id: OwnId = None,
    seconds: Seconds = 10.0,
    wait: Wait = 600.0,
) -> None:
    """Have one cluster save and leave, with exit status 0, and the others go on without it."""
    from dsx.ctl.follow import follow_leave

    with _visiting("leave", config, cluster_id, seconds) as (visit, link):
        if not 0 <= cluster < len(link.names):
            raise ValueError(f"--cluster {cluster}: give one of 0 to {len(link.names) - 1}")
        try:
            follow_leave(visit, cluster, link.names, typer.echo, wait)
        except TimeoutError as error:
            typer.echo(f"dsx ctl leave: {error}", err=True)
            raise typer.Exit(1) from error


@app.command("force-view")
@one_line_errors("ctl force-view", ModuleNotFoundError)
def force_view(
    config: Config,
    without: Annotated[
        list[int] | None, typer.Option(help="A cluster to be left out; once for each.")
    ] = None,
    with_: Annotated[
        list[int] | None, typer.Option("--with", help="Instead: a cluster that goes on.")
    ] = None,
    cluster_id: OwnId = None,
    seconds: Seconds = 10.0,
    wait: Wait = 120.0,
    yes: Annotated[bool, typer.Option("--yes", help="Ask no question.")] = False,
) -> None:
    """Have those go on who wait for others that are lost for good: read what it risks, below.

    If those that are left out run still, there may be two runs from then on.
    """
    from dsx.ctl.force import force, plan

    with _visiting("force-view", config, cluster_id, seconds) as (visit, link):
        if bool(without) == bool(with_):
            raise ValueError("say --without N or --with N, once for each cluster, and not both")
        made = plan(visit, link.names, without or [], with_ or [])
        typer.echo(made.question(link.names))
        if not yes and typer.prompt(f'Type "{made.word}" to do so', default="no") != made.word:
            typer.echo("nothing is done", err=True)
            raise typer.Exit(1)
        try:
            force(visit, made, link.names, typer.echo, wait)
        except TimeoutError as error:
            typer.echo(f"dsx ctl force-view: {error}", err=True)
            raise typer.Exit(1) from error


def _give(
    do: str,
    config: str,
    cluster_id: int | None,
    seconds: float,
    wait: float,
    ends: bool,
    **operands: Any,
) -> None:
    from dsx.ctl.follow import give

    with _visiting(do, config, cluster_id, seconds) as (visit, link):
        try:
            followed = give(visit, do, link.names, typer.echo, wait, ends, **operands)
        except TimeoutError as error:
            typer.echo(f"dsx ctl {do}: {error}", err=True)
            raise typer.Exit(1) from error
    if followed.failed:
        raise typer.Exit(1)


@contextmanager
def _visiting(
    verb: str, config: str, cluster_id: int | None, seconds: float
) -> Generator[tuple[Visit, LinkSettings]]:
    """Yield a visit to the run; exit status 1 where nobody answers."""
    from dsx.ctl.open import open_visit
    from dsx.ctl.visit import NobodyAnswers

    try:
        visit, link = open_visit(config, cluster_id, seconds)
        try:
            yield visit, link
        finally:
            visit.close()
    except NobodyAnswers as error:
        typer.echo(f"dsx ctl {verb}: {error}", err=True)
        raise typer.Exit(1) from error
