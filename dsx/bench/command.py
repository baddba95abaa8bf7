"""`dsx bench`: measure on this machine what a run will depend on.

    dsx bench codec --formats int4,int8 --json codec.json

A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from dsx.bench.chaos.command import chaos
from dsx.bench.convergence.command import convergence
from dsx.bench.convergence.wrong_command import guard
from dsx.bench.cores.command import cores
from dsx.bench.e2e.command import e2e
from dsx.bench.engines.command import engines
from dsx.bench.examples.command import examples
from dsx.bench.gpu.command import gpu
from dsx.bench.heal.command import heal
from dsx.bench.links.command import links
from dsx.bench.paper.command import paper
from dsx.bench.start.command import start
from dsx.bench.telemetry.command import telemetry
from dsx.bench.torchft.command import torchft
from dsx.bench.wall_clock.command import wall_clock
from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors
from dsx.core.renamed import COMMAND_LINE, warn_renamed

app = typer.Typer(no_args_is_help=True, help="Measure what dsx does on this machine.")
app.command()(e2e)
app.command()(convergence)
app.command()(guard)
app.command()(torchft)
app.command()(paper)
app.command()(examples)
app.command()(wall_clock)
app.command()(links)
app.command()(chaos)
app.command()(heal)
app.command()(cores)
app.command()(telemetry)
app.command()(gpu)
app.command()(start)
app.command()(engines)


@app.command()
@one_line_errors("bench codec", RuntimeError)
def codec(
    formats: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Formats to measure; default: all.")
    ] = None,
    numel: Annotated[int, typer.Option(help="Elements of the vector.", min=1)] = 16 * 2**20,
    kernels: Annotated[
        str,
        typer.Option(
            metavar="auto|native|compiled|eager", help="auto: the first of them that is there."
        ),
    ] = "auto",
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Of the group formats; default: their own.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="The best of so many passes counts.", min=1)] = 7,
    pseudo_gradients: Annotated[
        Path | None,
        typer.Option(
            "--pseudo-gradients", metavar="FILE.safetensors", help="Also measure the error on it."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Measure speed, size and error of the wire formats.

    That is on the CPU, and on a GPU if there is one. Speeds are of the fp32 side, one thread, wall
    time of the best pass, next to a copy of the same vector in the same passes.
    """
    from dsx.bench.codec import BenchOptions, measure_codecs, print_table

    options = BenchOptions.parse(formats, numel, kernels, group_size, repeats)
    figures = measure_codecs(options, pseudo_gradients)
    print_table(figures)
    if json_file is not None:
        json_file.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n")


@app.command()
@one_line_errors("bench overhead")
def overhead(
    numel: Annotated[
        str, typer.Option(metavar="N,N", help="Elements of the fragment.")
    ] = "1048576,16777216,67108864",
    repeats: Annotated[int, typer.Option(help="The median of so many launches.", min=1)] = 9,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    model_file: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="Write what plans are made with there."),
    ] = None,
) -> None:
    """Measure what launching a fragment, and applying its mean, cost the training thread.

    Next to it stands what its copies alone cost. `dsx plan --launch` reads the figures.
    """
    import torch

    from dsx.bench.launch import as_json, cost_of, measure_launches, print_launch
    from dsx.bench.start.bench import this_host

    sizes = _read_sizes(numel)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codecs = [{"type": "dense"}, {"type": "quantized", "wire": "int4"}]
    figures = measure_launches(sizes, device, codecs, repeats)
    print_launch(figures)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(figures), indent=2) + "\n")
    if model_file is not None:
        command = f"dsx bench overhead --numel {numel} --repeats {repeats}"
        host = f"{torch.get_num_threads()} of the {this_host()}"
        model_file.write_text(cost_of(figures, command, host).write())


@app.command()
@one_line_errors("bench pseudo-gradients")
def pseudo_gradients(
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where they go.")],
    data: Annotated[Path, typer.Option(help="A dataset of `dsx data build`.")] = Path(
        "data/stdlib"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds of training before.", min=1)] = 2,
) -> None:
    """Make pseudo-gradients for `dsx bench codec` to measure on.

    Two clusters in one process train the quickstart's model on real text; what one of them would
    send at the end of the last round is saved by parameter name. About a minute on two cores.
    """
    from dsx.bench.pseudo_gradients import save_pseudo_gradients

    save_pseudo_gradients(data, out, rounds)


def _read_sizes(text: str) -> list[int]:
    """Read numbers with commas between them."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ValueError(f"--numel={text} must be numbers above 0")
    return sizes


@app.command()
def line(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND ...", help="Run in every cluster.")
    ] = None,
    clusters: Annotated[int, typer.Option(help="2 to 4.")] = 2,
    mbit: Annotated[float, typer.Option(help="Each way, per cluster; Ethernet frames.")] = 22.0,
    queue_ms: Annotated[
        float, typer.Option(help="What may wait in a queue of the line before packets are lost.")
    ] = 50.0,
    burst_kb: Annotated[
        int | None, typer.Option(help="KiB that may pass at once after a pause; default 10 ms.")
    ] = None,
    latency_ms: Annotated[
        float, typer.Option(help="One way between two clusters; up to 2000, at most 100 Mbit/s.")
    ] = 0.0,
    pin: Annotated[bool, typer.Option("--pin", help="Give each cluster its own core.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
) -> None:
    """Run a command in clusters that slow lines join.

    COMMAND runs in 2 to 4 network namespaces of this host, each with a throttled line. {cluster},
    {clusters}, {address}, {rendezvous} and {interface} in it are replaced. Without a COMMAND the
    bare line is measured. All is removed at the end, on Ctrl-C, too. Exits with the first failed
    command's status, and with 77 where namespaces or `tc` are not to be had.
    """
    from rich.console import Console

    from dsx.bench import line as lines
    from dsx.bench.namespaces import TestbedUnavailable
    from dsx.bench.testbed import Line, Testbed, ending

    try:
        require_place("--json", json_file)
        line = Line(mbit, burst_kb, queue_ms, latency_ms)
        cores = lines.cores_for(clusters) if pin else None
        with Testbed(clusters, line) as bed:
            results = (
                lines.run_in_clusters(bed, command, cores) if command else [lines.probe(bed, line)]
            )
    except (
        TestbedUnavailable, ValueError, FileNotFoundError, lines.ProbeFailed, KeyboardInterrupt
    ) as error:  # fmt: skip
        reason, status = ending(error)
        typer.echo(f"dsx bench line: {reason}", err=True)
        raise typer.Exit(status) from None
    lines.show_results(results, Console())
    if bed.forwarded.frames:
        typer.echo(lines.say_forwarded(bed.forwarded))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    failed = [r for r in results if r.status]
    if failed:  # the others were ended because of the first
        status = min(failed, key=lambda r: r.seconds).status
        raise typer.Exit(status if status > 0 else 128 - status)


@app.command("link", hidden=True)
@wraps(line)
def _line_as_it_was_called(*args: Any, **kwargs: Any) -> None:
    warn_renamed("dsx bench link", "dsx bench line", COMMAND_LINE)
    line(*args, **kwargs)


@app.command("launch", hidden=True)
@wraps(overhead)
def _overhead_as_it_was_called(*args: Any, **kwargs: Any) -> None:
    warn_renamed("dsx bench launch", "dsx bench overhead", COMMAND_LINE)
    overhead(*args, **kwargs)
