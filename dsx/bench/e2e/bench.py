"""`dsx bench e2e`: every preset against no communication and against all-reduce, on a slow line.

The line is chosen by what decides: `ratio` = seconds of an all-reduce of fp32 gradients over the
seconds of an inner step. DiLoCoX (arXiv:2506.21263) reports ratios of about 32 and 350.

All runs take the same number of steps on the same batches from the same weights, so their losses
are after the same number of tokens. DeepSpeed's own data parallel is timed for a few steps on the
line; its loss is that of a run of all the steps with the line lifted.

A preset's utilization is held against the ceiling before and after every block of its rounds, and
the median of the blocks counts: a machine's own speed drifts by more than what is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dsx.bench.e2e.job import Job, Mode, Shape, build_model
from dsx.bench.e2e.plan import Plan, Situation, plan_presets
from dsx.bench.e2e.row import Row
from dsx.bench.e2e.run import Measured, Runner
from dsx.bench.kinds import GLOO, Kind
from dsx.bench.line import cores_for, shared_cores
from dsx.bench.testbed import MAX_CLUSTERS, Line, Testbed
from dsx.core.types import ParameterShape
from dsx.method.choices import PRESETS
from dsx.plan.link import Link, wire_bytes
from dsx.plan.predict import data_parallel
from dsx.plan.published.scenario import require_number

_CEILING_PERIOD = 10  # steps
_CEILING_SECONDS = 6.0  # before a block and after it
_SYNCHRONOUS_STEPS = 4
_DEADLINE_SECONDS = 6 * 3600.0  # of a whole run, which ends at once where one of its parts fails


@dataclass(frozen=True)
class Options:
    """What is asked for; `margin` is the time of H steps over that of the transfers in them.

    A run has `blocks` blocks, each of one round that is not counted and `rounds` that are. `shape`
    None stands for `Shape.for_ratio`. The line's latency, one way, is beside the ratio, which is of
    its rate. Each preset is run over each of `kinds`, one after the other.
    """

    directory: Path
    data: Path
    num_clusters: int = 2
    ratios: tuple[float, ...] = (32.0, 350.0)
    presets: tuple[str, ...] = tuple(PRESETS)
    rounds: int = 1
    blocks: int = 3
    margin: float = 1.15
    shape: Shape | None = None
    latency_milliseconds: float = 0.0
    kinds: tuple[Kind, ...] = (GLOO,)

    def __post_init__(self) -> None:
        for name in self.presets:
            if name not in PRESETS:
                raise ValueError(f"presets={name!r} is not known; allowed: {', '.join(PRESETS)}")
        for ratio in self.ratios:
            require_number("ratios", ratio, 1, 10_000)
        require_number("clusters", self.num_clusters, 2, MAX_CLUSTERS)
        require_number("rounds", self.rounds, 1, 1000)
        require_number("blocks", self.blocks, 1, 1000)
        require_number("margin", self.margin, 1.0, 10.0)
        require_number("latency_milliseconds", self.latency_milliseconds, 0, 2000)


def measure(options: Options, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield a row per ratio and method; `tell` gets a line per run.

    ValueError for inputs, TestbedUnavailable if this host has no slow line, RunFailed otherwise.
    """
    with open_runner(options) as runner:
        for ratio in options.ratios:
            yield from Bench(options, ratio, runner, tell).rows()


class Place(Protocol):
    """What a testbed is made for."""

    @property
    def num_clusters(self) -> int:
        """How many."""
        ...

    @property
    def data(self) -> Path:
        """A dataset of `dsx data build`."""
        ...


@contextmanager
def open_runner(options: Place, shares_cores: bool = False) -> Generator[Runner, None, None]:
    """Make the testbed, and remove it at the end; errors as of `measure`.

    A core is for one cluster, unless `shares_cores` lets several take turns on it.
    """
    cores = (shared_cores if shares_cores else cores_for)(options.num_clusters)
    data = options.data
    if not (data / "dataset.json").is_file():
        build = f"dsx data build --from stdlib --out {data}"
        raise ValueError(f"{data} is not a dataset; build one with: {build}")
    with Testbed(options.num_clusters, None) as bed:
        yield Runner(bed, cores, _DEADLINE_SECONDS)


class Bench:
    """Plans the runs of one ratio, and reads rows off them."""

    def __init__(
        self, options: Options, ratio: float, runner: Runner, tell: Callable[[str], None]
    ) -> None:
        self._options = options
        self._ratio = ratio
        self._runner = runner
        self._tell = tell
        self.shape = options.shape or Shape.for_ratio(ratio)
        named = build_model(self.shape, 0).named_parameters()
        self._parameters = [ParameterShape(name, tuple(p.shape)) for name, p in named]
        self._numel = sum(math.prod(p.shape) for p in self._parameters)

    def rows(self) -> Iterator[Row]:
        """Yield no communication and all-reduce, then every preset when it has been run."""
        options = self._options
        plans = plan_presets(options.presets, self.situation_to_plan(), options.margin)
        steps = self.steps_of(plans[0].interval)
        line, ceiling, synchronous = self.references(steps)
        yield ceiling
        yield synchronous
        for plan in plans:
            for kind in options.kinds:
                row = self.preset(plan, line, steps, kind)
                yield replace(row, speedup=row.utilization * ceiling.speedup)

    def references(self, steps: int) -> tuple[Line, Row, Row]:
        """Run what presets are held against; return the line, no communication and all-reduce."""
        line, ceiling_run = self.measure_ceiling(steps)
        synchronous = self._synchronous(line, steps, ceiling_run.step_seconds(_CEILING_PERIOD))
        return line, self._ceiling(ceiling_run, synchronous), synchronous

    def steps_of(self, interval: int) -> int:
        """Return how many steps a run of all blocks takes."""
        return self._options.blocks * (self._options.rounds + 1) * interval

    def situation_to_plan(self) -> Situation:
        """Return what H and tau are planned for.

        Without a latency they do not depend on the seconds of a step, which only scale all times
        alike; with one, some steps are measured first.
        """
        if not self._options.latency_milliseconds:
            return self.situation(1.0)
        run = self._run("step", "ceiling", 3 * _CEILING_PERIOD)
        return self.situation(run.step_seconds(_CEILING_PERIOD))

    def situation(self, step_seconds: float) -> Situation:
        """Return the model on the line whose all-reduce takes the ratio times as long as a step."""
        clusters = self._options.num_clusters
        sent = wire_bytes(2 * (clusters - 1) / clusters * 4 * self._numel)
        latency = self._options.latency_milliseconds / 1000
        link = Link(8 * sent / (self._ratio * step_seconds), latency)
        return Situation(self._parameters, step_seconds, link, clusters)

    def measure_ceiling(self, steps: int) -> tuple[Line, Measured]:
        """Train without communication; return the line for its steps, and what was measured."""
        ceiling_run = self._run("ceiling", "ceiling", steps)
        step_seconds = ceiling_run.step_seconds(_CEILING_PERIOD)
        rate = 1e-6 * self.situation(step_seconds).link.bits_per_second
        line = Line(rate, latency_milliseconds=self._options.latency_milliseconds)
        self._tell(
            f"ratio {self._ratio:g}: {line.megabits_per_second:.3g} Mbit/s for {self._numel:,} "
            f"parameters and {1000 * step_seconds:.1f} ms per step; {steps} steps each"
        )
        return line, ceiling_run

    def preset(self, plan: Plan, line: Line, steps: int, kind: Kind = GLOO) -> Row:
        """Run a preset as planned."""
        name = plan.name if kind == GLOO else f"{plan.name}_{kind.transport}_{kind.security}"
        measured = self._run(name, "dsx", steps, line, plan.block, plan.interval, kind)
        return self.row(plan, measured, line, kind)

    def _run(
        self,
        name: str,
        mode: Mode,
        steps: int,
        line: Line | None = None,
        block: dict[str, Any] | None = None,
        interval: int | None = None,
        kind: Kind = GLOO,
    ) -> Measured:
        return self._runner.run(self.job(name, mode, steps, interval, block, kind), line)

    def job(
        self,
        name: str,
        mode: Mode,
        steps: int,
        interval: int | None,
        block: dict[str, Any] | None = None,
        kind: Kind = GLOO,
    ) -> Job:
        """Return a job in a directory of its own; all steps are one block without an `interval`."""
        options = self._options
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.shape.batch_size,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
            "steps_per_print": 10**9,
        }
        if block is not None:
            clusters, link = self._runner.meeting(kind, options.directory.resolve())
            link = {**block.get("link", {}), **link}
            config["dsx"] = {**block, "clusters": clusters, "link": link}
        directory = options.directory.resolve() / f"{self._ratio:g}_{name}"
        steps_per_block = steps if interval is None else (options.rounds + 1) * interval
        return Job(
            mode, config, self.shape, steps, steps_per_block, options.num_clusters,
            str(options.data.resolve()), str(directory), _DEADLINE_SECONDS, _CEILING_SECONDS,
        )  # fmt: skip

    def row(self, plan: Plan, measured: Measured, line: Line, kind: Kind = GLOO) -> Row:
        """Read a row off a run that did what the plan says."""
        blocks = measured.blocks(plan.interval)
        ceiling = statistics.median(block.ceiling_seconds for block in blocks)
        shares = [block.utilization for block in blocks]
        utilization = statistics.median(shares)
        step_seconds = statistics.median(block.step_seconds for block in blocks)
        exposed = [block.step_seconds - block.ceiling_seconds for block in blocks]
        waits = [plan.interval * block.wait_seconds for block in blocks]
        waited = statistics.median(waits)
        under_way = plan.interval * statistics.median(block.transfer_seconds for block in blocks)
        steps = len(measured.clusters[0]["steps"])
        situation = Situation(self._parameters, ceiling, _link_of(line), self._options.num_clusters)
        spread = (max(shares) - min(shares)) / 2
        payload, wire = measured.sent()
        row = Row(
            ratio=self._ratio,
            megabits_per_second=line.megabits_per_second,
            shape=str(self.shape),
            method=plan.name,
            interval=plan.method.schedule.interval,
            delay_steps=plan.method.delay.steps,
            steps=steps,
            is_overlapped=plan.is_overlapped,
            step_seconds=step_seconds,
            ceiling_seconds=ceiling,
            tokens_per_second=self._tokens / step_seconds,
            utilization=utilization,
            predicted_utilization=plan.predict(situation).utilization,
            exposed_seconds=plan.interval * statistics.median(exposed),
            wire_bytes=wire,
            payload_bytes=payload,
            planned_bytes=plan.bytes_sent(situation, steps),
            validation_loss=measured.mean("validation_loss"),
            utilization_spread=spread,
            wait_seconds=None if math.isnan(waited) else waited,
            latency_milliseconds=line.latency_milliseconds,
            block_utilizations=tuple(shares),
            block_overlaps=tuple(b.overlap for b in blocks if not math.isnan(b.overlap)),
            transfer_seconds=None if math.isnan(under_way) else under_way,
            transport=kind.transport,
            security=kind.security,
            wait_half_range=None if math.isnan(waited) else (max(waits) - min(waits)) / 2,
        )
        self._tell(f"  {row.name}: utilization {utilization:.1%} +- {spread:.1%}")
        return row

    @property
    def _tokens(self) -> int:
        """Per step, of all clusters."""
        return self._options.num_clusters * self.shape.tokens_per_step

    def _ceiling(self, ceiling_run: Measured, like: Row) -> Row:
        """Return the row of no communication; its loss is the mean of the clusters' own."""
        ceiling = like.ceiling_seconds
        return replace(
            like,
            method="no communication",
            interval=0,
            step_seconds=ceiling,
            ceiling_seconds=ceiling,
            tokens_per_second=self._tokens / ceiling,
            utilization=1.0,
            predicted_utilization=1.0,
            exposed_seconds=0.0,
            wire_bytes=0,
            payload_bytes=0,
            planned_bytes=0,
            validation_loss=ceiling_run.mean("validation_loss"),
            speedup=like.step_seconds / ceiling,
        )

    def _synchronous(self, line: Line, steps: int, ceiling: float) -> Row:
        timed = self._run("data_parallel", "data_parallel", _SYNCHRONOUS_STEPS + 1, line)
        self._tell("  data parallel: timed")
        whole = self._run("data_parallel_lifted", "data_parallel", steps)
        step_seconds = timed.step_seconds(1)
        clusters = self._options.num_clusters
        predicted = data_parallel([self._numel], clusters, ceiling, _link_of(line))
        sent = timed.clusters[0]["steps"]
        return Row(
            ratio=self._ratio,
            megabits_per_second=line.megabits_per_second,
            shape=str(self.shape),
            method="data_parallel",
            interval=1,
            delay_steps=0,
            steps=steps,
            is_overlapped=False,
            step_seconds=step_seconds,
            ceiling_seconds=ceiling,
            tokens_per_second=self._tokens / step_seconds,
            utilization=ceiling / step_seconds,
            predicted_utilization=predicted.utilization,
            exposed_seconds=step_seconds - ceiling,
            wire_bytes=round(steps * (sent[-1]["wire_bytes"] - sent[0]["wire_bytes"])
                             / _SYNCHRONOUS_STEPS),
            payload_bytes=None,
            planned_bytes=round(steps * predicted.bytes_per_round),
            validation_loss=whole.mean("validation_loss"),
            latency_milliseconds=line.latency_milliseconds,
        )  # fmt: skip


def _link_of(line: Line) -> Link:
    return Link(1e6 * line.megabits_per_second, line.latency_milliseconds / 1000)
