"""torchft's DiLoCo beside dsx's `diloco` and `dilocox`, on the same slow line of this host.

Same model, weights, batches, inner and outer optimizers, line, and H. As in `dsx bench e2e`, every
cluster has a network namespace and a core of its own, and utilization is held against steps without
communication on that core before and after every block of rounds: by DeepSpeed's engine for dsx,
which trains under it, and by plain torch for torchft.

Bytes on the wire are the kernel's count per cluster, headers and torchft's heartbeats included.
torchft counts no payload: its column is what its all-reduces send in fp32, without any header.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from dsx.bench.e2e.bench import Bench, Options, Row, open_runner
from dsx.bench.e2e.plan import Plan, plan_preset, planned_interval
from dsx.bench.e2e.run import Runner
from dsx.bench.e2e.show import size_or_dash
from dsx.bench.testbed import Line

_WORKER = "dsx.bench.torchft.worker"


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


def measure(options: Options, choices: Choices, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield a `Row` of dsx.bench.e2e per method; errors as there."""
    with open_runner(options) as runner:
        bench = Bench(options, choices.ratio, runner, tell)
        situation = bench.situation_to_plan()
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
        command = [sys.executable, "-m", _WORKER, "--interval", str(plan.interval)]
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
    return {key: value for key, value in asdict(row).items() if key != "speedup"}
