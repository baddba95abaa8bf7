"""torchft's DiLoCo beside dsx's `diloco` and `dilocox`, on the same slow line of this host.

    pip install torchft
    python scripts/bench_torchft.py --ratio 32 --json torchft.json

Same model, weights, batches, inner and outer optimizers, line, and H. As in `dsx bench e2e`, every
cluster has a network namespace and a core of its own, and utilization is held against steps without
communication on that core before and after every block of rounds: by DeepSpeed's engine for dsx,
which trains under it, and by plain torch for torchft. `--fragments N --delay D` adds torchft's
streaming DiLoCo, and dsx's with the same fragments and tau.

Bytes on the wire are the kernel's count per cluster, headers and torchft's heartbeats included.
torchft counts no payload: its column is what its all-reduces send in fp32, without any header.

Exits with 77 where torchft is not installed, or network namespaces or `tc` are not to be had.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dsx.bench.testbed import UNAVAILABLE, Line, TestbedUnavailable, ending
from dsx.config.files import require_place

if TYPE_CHECKING:  # these import torch, which a skip does not need
    from dsx.bench.e2e.bench import Bench, Options, Row
    from dsx.bench.e2e.plan import Plan
    from dsx.bench.e2e.run import Runner

_WORKER = Path(__file__).with_name("torchft_worker.py")


@dataclass(frozen=True)
class Choices:
    """What is compared; `interval` None is the planner's."""

    ratio: float
    interval: int | None
    fragments: int
    delay: int

    def check(self, interval: int, num_layers: int) -> None:
        """Raise ValueError for what torchft's fragments cannot do."""
        if num_layers % self.fragments or interval % self.fragments:
            raise ValueError(
                f"fragments={self.fragments} must divide the {num_layers} layers of the shape and "
                f"H = {interval}; try 2, and --interval {interval + interval % 2}"
            )
        if not 0 <= self.delay < interval // self.fragments:
            raise ValueError(
                f"delay={self.delay} must be at least 0 and below H / fragments = "
                f"{interval // self.fragments}: torchft has one fragment under way at a time"
            )


def main() -> int:
    arguments = parse_arguments()
    reason = why_no_torchft()
    if reason is not None:
        print(f"bench_torchft: {reason}", file=sys.stderr)
        return UNAVAILABLE
    from dsx.bench.e2e.bench import Options
    from dsx.bench.e2e.job import Shape
    from dsx.bench.e2e.run import RunFailed

    choices = Choices(
        arguments.ratio, arguments.interval, arguments.fragments or 1, arguments.delay or 0
    )
    rows: list[Row] = []
    status = 0
    try:
        require_place("--json", arguments.json)
        shape = None if arguments.shape is None else Shape.parse(arguments.shape)
        options = Options(
            arguments.out, arguments.data, ratios=(arguments.ratio,), rounds=arguments.rounds,
            blocks=arguments.blocks, shape=shape,
        )  # fmt: skip
        for row in measure(options, choices, lambda line: print(line, file=sys.stderr)):
            rows.append(row)
    except (ValueError, TestbedUnavailable, RunFailed, KeyboardInterrupt) as error:
        reason, status = ending(error)
        print(f"bench_torchft: {reason}", file=sys.stderr)
    if rows:
        show(rows, Console(width=None if Console().is_terminal else 130))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([as_json(row) for row in rows], indent=2) + "\n")
    return status


def why_no_torchft() -> str | None:
    """Return why torchft cannot be used; None if it can."""
    try:
        import torchft.local_sgd  # noqa: F401
    except ImportError as error:
        return f"no torchft ({error}): pip install torchft"
    return None


def measure(options: Options, choices: Choices, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield a `Row` of dsx.bench.e2e per method; errors as there."""
    from dsx.bench.e2e.bench import Bench, open_runner
    from dsx.bench.e2e.plan import plan_preset, planned_interval

    with open_runner(options) as runner:
        bench = Bench(options, choices.ratio, runner, tell)
        situation = bench.situation()
        interval = choices.interval or planned_interval(situation, options.margin)
        if choices.interval is None:  # rounded up to whole fragments
            interval = -(-interval // choices.fragments) * choices.fragments
        choices.check(interval, bench.shape.num_layers)
        steps = bench.steps_of(interval)
        tell(f"H = {interval}")
        blocking = plan_preset("diloco", interval, situation, options.margin)
        compressed = plan_preset("dilocox", interval, situation, options.margin)
        line, _ = bench.measure_ceiling(steps)
        versus = Versus(bench, runner, line, steps)
        yield versus.torchft("torchft DiLoCo", blocking)
        yield versus.dsx(blocking)
        if choices.fragments > 1:
            streams = {
                "fragments": {"by": "layer", "num_fragments": choices.fragments,
                              "pattern": "sequential"},
                "delay": {"steps": choices.delay, "alpha": 0.5},  # half local, half global
            }  # fmt: skip
            plan = plan_preset("streaming_diloco", interval, situation, options.margin, streams)
            yield versus.torchft("torchft streaming", plan, choices.fragments, choices.delay)
            yield versus.dsx(plan)
        yield versus.dsx(compressed)


@dataclass(frozen=True)
class Versus:
    """Runs the methods of both on one line."""

    bench: Bench
    runner: Runner
    line: Line
    steps: int

    def dsx(self, plan: Plan) -> Row:
        """Run a preset as planned; return its row."""
        row = self.bench.preset(plan, self.line, self.steps)
        return replace(row, method=f"dsx {row.method}")

    def torchft(self, method: str, plan: Plan, fragments: int = 1, delay: int = 0) -> Row:
        """Run torchft with the H and the outer optimizer of a plan; return its row."""
        outer = plan.block["outer_optimizer"]
        command = [sys.executable, str(_WORKER), "--interval", str(plan.interval)]
        if fragments > 1:
            command += ["--fragments", str(fragments), "--delay", str(delay)]
            command += ["--local-weight", "0.5"]
        command += ["--outer-lr", str(outer["lr"]), "--outer-momentum", str(outer["momentum"])]
        job = self.bench.job(method.replace(" ", "_"), "peer", self.steps, plan.interval)
        path, clusters = job.write(), range(job.num_clusters)
        commands = [[*command, "--job", str(path), "--cluster", str(m)] for m in clusters]
        measured = self.runner.run_commands(path.parent, commands, self.line)
        row = self.bench.row(plan, measured, self.line)
        return replace(row, method=method)


def show(rows: list[Row], console: Console) -> None:
    """Print a line per method; tokens per second are of all clusters, bytes of one."""
    from dsx.bench.e2e.show import size_or_dash

    first = rows[0]
    table = Table(
        title=f"ratio {first.ratio:g}: {first.megabits_per_second:.3g} Mbit/s each way, H = "
        f"{first.interval}; {first.steps} steps each",
        title_justify="left",
    )
    table.add_column("method")
    for name in ("tokens/s", "without sync", "utilization", "half range", "exposed s per H",
                 "on the wire", "payload", "loss"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / row.utilization:,.0f}",
            f"{row.utilization:.1%}",
            f"{row.utilization_spread:.1%}",
            f"{row.exposed_seconds:.2f}",
            size_or_dash(row.wire_bytes),
            size_or_dash(row.payload_bytes),
            f"{row.validation_loss:.4f}",
        )
    console.print(table)


def as_json(row: Row) -> dict[str, Any]:
    """Return plain values, without the speed against an all-reduce that is not measured here."""
    return {key: value for key, value in row.as_json().items() if key != "speedup"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ratio",
        type=float,
        default=32.0,
        metavar="N",
        help="seconds of an all-reduce over those of a step (%(default)g)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="of a block that count, after one more that does not (%(default)d)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=3,
        help="of a run, between them steps without sync; the table has medians over blocks "
        "(%(default)d)",
    )
    parser.add_argument("--interval", type=int, metavar="H", help="default: the planner's")
    parser.add_argument("--fragments", type=int, metavar="N", help="also stream N fragments")
    parser.add_argument("--delay", type=int, metavar="D", help="tau of the fragments")
    parser.add_argument(
        "--shape", metavar="LAYERS,HIDDEN,LENGTH,BATCH", help="default: as for dsx bench e2e"
    )
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench_torchft"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if (arguments.fragments is None) != (arguments.delay is None):
        parser.error("--fragments and --delay go together, e.g. --fragments 2 --delay 8")
    for name in ("interval", "fragments"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name}={getattr(arguments, name)} must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
