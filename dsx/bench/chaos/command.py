"""`dsx bench chaos` on the command line.

    dsx bench chaos --clusters 4 --events 40 --json chaos.json

A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

Option = typer.Option


@one_line_errors("bench chaos")
def chaos(
    clusters: Annotated[int, Option(help="Clusters, all on this host.")] = 4,
    ranks: Annotated[int, Option(help="Ranks of each.")] = 2,
    engine: Annotated[
        str, Option(metavar="NAME", help="What trains: torch (DDP), deepspeed or megatron.")
    ] = "torch",
    zero: Annotated[
        int | None, Option(metavar="STAGE", help="0 to 3, of DeepSpeed; default: 1.")
    ] = None,
    preset: Annotated[
        str,
        Option(metavar="NAME", help="streaming, delayed, recommended or diloco; with int4 codes."),
    ] = "streaming",
    events: Annotated[int, Option(help="Faults.")] = 40,
    seed: Annotated[int, Option(help="Of faults, model and data.")] = 0,
    kinds: Annotated[
        str | None, Option(metavar="NAME,NAME", help="Of faults; default: all.")
    ] = None,
    step_seconds: Annotated[float, Option(help="The least that a step takes.")] = 0.03,
    suspect_seconds: Annotated[float, Option(help="`link.suspect_seconds` of the run.")] = 8.0,
    longest_pause: Annotated[
        float, Option(help="Of a cluster or a line; at most half of --suspect-seconds.")
    ] = 2.0,
    undisturbed: Annotated[
        bool, Option(help="Train as many samples without faults, too, for its loss.")
    ] = True,
    comes_back: Annotated[
        bool, Option(help="Start a cluster again that was killed: it joins the run that goes on.")
    ] = True,
    against: Annotated[
        str | None, Option(metavar="NAME", help="torchft: give it the same faults; torch alone.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Where logs go, a new folder; default: one in /tmp.")
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write what it came to there.")
    ] = None,
) -> None:
    """Kill, pause, cut and garble a run of real processes, and count what is lost.

    Every rank is a process that writes down what it does; the count is made from that alone. Faults
    follow from --seed: kill_rank, kill_cluster, kill_leader, pause, reset, cut, cut_one_way,
    garble, not_finite, too_large, clock, leave, join, full_disk (as root). A cluster that was
    killed is started again and joins the others; one that leaves stays away until a join, where
    that is among them; or all stay away. Two are always left.
    Exit status 1 where a round or a sample is lost, a sample is trained on twice, hashes differ, or
    anybody does not go on.
    """
    require_place("--json", json_file)
    status = _measure(
        kinds, out or Path(tempfile.mkdtemp(prefix="dsx-chaos-")) / "run", json_file, against,
        preset=preset, num_clusters=clusters, num_ranks=ranks, num_events=events, seed=seed,
        step_seconds=step_seconds, suspect_seconds=suspect_seconds, longest_pause=longest_pause,
        undisturbed=undisturbed, comes_back=comes_back, engine=engine, zero_stage=zero,
    )  # fmt: skip
    if status:
        raise typer.Exit(status)


def _measure(
    kinds: str | None, directory: Path, json_file: Path | None, against: str | None, **choices: Any
) -> int:
    """Show and write what was measured; return the exit status."""
    from rich.console import Console

    from dsx.bench.chaos.against.bench import compare
    from dsx.bench.chaos.against.job import LEFT_OUT, require_comparable
    from dsx.bench.chaos.against.show import show as show_both
    from dsx.bench.chaos.bench import Options, measure
    from dsx.bench.chaos.disks import may_mount
    from dsx.bench.chaos.faults import KINDS, Kind
    from dsx.bench.chaos.forking import NoProgress
    from dsx.bench.chaos.show import show

    chosen: Sequence[Kind] = KINDS if kinds is None else cast("Any", kinds.split(","))
    if kinds is None and against is not None:
        chosen = [kind for kind in KINDS if kind not in LEFT_OUT]
    elif kinds is None and not may_mount():
        _tell("full_disk is left out: this process may not mount a disk")
        chosen = [kind for kind in KINDS if kind != "full_disk"]
    options = Options(directory, kinds=chosen, **choices)
    if against is not None:
        require_comparable(against, options)
        for kind, why in LEFT_OUT.items():
            _tell(f"{kind} is left out: {why}")
    try:
        report = measure(options, _tell)
    except NoProgress as error:
        _tell(f"dsx bench chaos: {error}; logs in {directory}")
        return 1
    show(report, Console())
    found, status = report.as_json(), 0 if report.verdict.is_good else 1
    if against is not None:
        try:
            both = compare(report, _tell)
        except NoProgress as error:
            _tell(f"dsx bench chaos: torchft's run does not begin: {error}; logs in {directory}")
            status = 1
        else:
            show_both(both, Console())
            found["against"] = both.as_json()
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    return status


def _tell(line: str) -> None:
    typer.echo(line, err=True)
