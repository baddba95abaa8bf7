"""The `dsx` command: what surrounds a run. Training itself is started by the engine's launcher.

Each command's module lies in the package that does its work and imports that work only once the
command is called, so that `dsx --help` and shell completion answer at once. Here they are mounted.
"""

from __future__ import annotations

from typing import Annotated

import typer

import dsx
from dsx.agent.command import agent
from dsx.bench.command import app as bench_app
from dsx.bench.dry_run.command import dry_run
from dsx.bench.net_test.command import net_test
from dsx.comm.command import rendezvous
from dsx.comm.links.keys_command import app as keys_app
from dsx.comm.links.relay_command import relay
from dsx.config.command import app as config_app
from dsx.ctl.command import app as ctl_app
from dsx.ctl.watch_command import watch
from dsx.data.command import app as data_app
from dsx.engines.command import export
from dsx.examples.command import quickstart
from dsx.plan.command import plan
from dsx.plan.init.command import init
from dsx.plan.memory.command import memory
from dsx.plan.published.simulate import simulate
from dsx.support.command import support
from dsx.support.doctor.command import doctor
from dsx.support.keys_check import keys_check
from dsx.telemetry.command import report
from dsx.telemetry.top.command import top
from dsx.telemetry.trace.command import trace
from dsx.training.notices_command import notices

BEFORE, DURING, AFTER = "Before a run", "For a run", "After a run"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command(rich_help_panel=BEFORE)(doctor)
app.command("dry-run", rich_help_panel=BEFORE)(dry_run)
app.command(rich_help_panel=BEFORE)(init)
app.command(rich_help_panel=BEFORE)(memory)
app.command(rich_help_panel=BEFORE)(net_test)
app.command(rich_help_panel=BEFORE)(notices)
app.command(rich_help_panel=BEFORE)(plan)
app.command(rich_help_panel=BEFORE)(simulate)
app.add_typer(bench_app, name="bench", rich_help_panel=BEFORE)
app.add_typer(config_app, name="config", rich_help_panel=BEFORE)
keys_app.command("check")(keys_check)
app.add_typer(keys_app, name="keys", rich_help_panel=BEFORE)
app.command(rich_help_panel=DURING)(agent)
app.add_typer(ctl_app, name="ctl", rich_help_panel=DURING)
app.add_typer(data_app, name="data", rich_help_panel=DURING)
app.command(rich_help_panel=DURING, context_settings=PASSED_ON)(quickstart)
app.command(rich_help_panel=DURING)(rendezvous)
app.command(rich_help_panel=DURING)(relay)
app.command(rich_help_panel=DURING)(watch)
app.command(rich_help_panel=DURING)(top)
app.command(rich_help_panel=AFTER)(export)
app.command(rich_help_panel=AFTER)(report)
app.command(rich_help_panel=AFTER)(support)
app.command(rich_help_panel=AFTER)(trace)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"dsx {dsx.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train one run across sites joined by slow links."""
