"""The `dsx` command: what surrounds a run. Training itself is started by the engine's launcher."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from dsx.bench.command import app as bench_app
from dsx.bench.net_test.command import net_test
from dsx.data.command import app as data_app
from dsx.plan.plan_command import plan
from dsx.plan.published.command import simulate
from dsx.telemetry.trace.command import trace

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one run across sites joined by slow links.",
)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.command()(simulate)
app.command()(plan)
app.command()(net_test)
app.command()(trace)


@app.callback()
def main() -> None:
    """Train one run across sites joined by slow links."""


@app.command()
def rendezvous(
    port: Annotated[int, typer.Option(help="TCP port to listen on; 0 picks a free one.")] = 29400,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
) -> None:
    """Hold the meeting point of the clusters, so that none of them owns it. Ends on Ctrl-C.

    Use it with "clusters": {"rendezvous": "tcp://HOST:PORT", "store": "standalone"}.
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


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="The directory that metrics.dir names.")],
) -> None:
    """Summarise a run's records in a table and plot them to RUN_DIR/plot.png."""
    from dsx.telemetry.report import report as write_report

    try:
        write_report(run_dir)
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"dsx report: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def export(
    checkpoints: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_DIR", help="It holds cluster_0, cluster_1, ...")
    ],
    out: Annotated[Path, typer.Option(help="The directory to write to.")],
    format: Annotated[
        str, typer.Option(metavar="safetensors|universal", help="See above.")
    ] = "safetensors",
    tag: Annotated[
        str | None, typer.Option(help="Default: the newest that all clusters hold complete.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16", help="Of weights; safetensors only.")
    ] = "fp32",
    max_shard_size: Annotated[
        float, typer.Option(help="GB (10^9 bytes) per file; safetensors only.", min=1e-6)
    ] = 5.0,
) -> None:
    """Write the averaged model of a checkpoint; from its files alone, on any machine.

    The model is what averaged() held at the save: by method the anchor, or the mean of the
    clusters, whose directories have to be there. Transfers that were in flight are left out.

    safetensors: model.safetensors, or several with an index, under the module's own names. Frozen
    parameters and buffers are cluster 0's.

    universal: a DeepSpeed universal checkpoint, for another number of ranks: the averaged weights,
    with the inner optimizer's states of the first cluster at hand. Load it into an engine without
    dsx, with "checkpoint": {"load_universal": true} in its JSON.
    """
    from dsx.engines.export import ExportOptions, export_checkpoint

    try:
        options = ExportOptions(checkpoints, out, format, tag, dtype, max_shard_size)
        export_checkpoint(options, typer.echo)
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"dsx export: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def memory(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="Megatron flags, or a DeepSpeed JSON.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="With a JSON: a file of flags for the model's sizes.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Accelerators per cluster; default tensor x pipeline.", min=1)
    ] = None,
    limit: Annotated[float, typer.Option(help="GiB of one accelerator.", min=0.001)] = 40.0,
    json: Annotated[bool, typer.Option(help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the memory of each rank, inner and outer, and say whether it fits.

    FILE holds Megatron's flags together with the --dsx-* ones, as on the command line, or it is a
    DeepSpeed JSON with a "dsx" block. Exits with 1 if it does not fit.
    """
    from rich.console import Console

    from dsx.plan.memory.command import read_plan, show_memory

    try:
        fits = show_memory(read_plan(source, model, ranks), limit, json, Console())
    except ValueError as error:
        typer.echo(f"dsx memory: {error}", err=True)
        raise typer.Exit(2) from error
    if not fits:
        raise typer.Exit(1)
