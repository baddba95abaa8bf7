"""How long a killed cluster takes to be back, what the others lose by it, and what a restart takes.

Three clusters (a process each, of plain PyTorch, with the preset `recommended`) train on throttled
lines. The last one is killed and started again, with and without a checkpoint of its own; then all
are killed, and start from the checkpoint.

What the others lose is by their clocks: the mean of their steps while the cluster comes back, less
that of two periods before it was killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from dsx.bench.e2e.run import Runner
from dsx.bench.heal.job import Job
from dsx.bench.heal.run import Record, Run
from dsx.bench.kinds import KINDS
from dsx.bench.line import shared_cores
from dsx.bench.testbed import Line, Testbed
from dsx.plan.published.scenario import require_number

_SUSPECT_SECONDS = 4.0
_ETHERNET = 0.956  # of a line's bits, what frames leave
_CALM_PERIODS = 2
_AWAY_STEPS = 16
HEAL, OWN, RESTART = "started again", "with its own checkpoint", "all from the checkpoint"


@dataclass(frozen=True)
class Options:
    """What is measured: `mbit` each way; a model of `num_layers` matrices of `width` squared."""

    mbit: float = 200.0
    num_clusters: int = 3
    num_layers: int = 8
    width: int = 1024
    interval: int = 32
    step_seconds: float = 0.25
    repeats: int = 3
    heal_rate_mbit: float | None = None
    deadline_seconds: float = 600.0

    def __post_init__(self) -> None:
        require_number("mbit", self.mbit, 1, 100_000)
        require_number("clusters", self.num_clusters, 3, 4)  # of two the one left would wait
        require_number("layers", self.num_layers, 1, 1000)
        require_number("width", self.width, 16, 32_768)
        require_number("interval", self.interval, max(4, self.num_layers), 10_000)
        require_number("step_seconds", self.step_seconds, 0.01, 60)
        require_number("repeats", self.repeats, 1, 100)

    @property
    def num_elements(self) -> int:
        """Parameters of the model."""
        return self.num_layers * self.width**2


@dataclass(frozen=True)
class Row:
    """One way to be back. Seconds, and MB of payload that were copied and that were there.

    `line_seconds` is what the line takes for what was copied; `heal_seconds` from the first request
    to the step of the others; `total_seconds` from the start of the process to the first step of
    the others with it (of all: to the first step of the last one). `lost_percent` is what the
    others' training threads lose of the time from when it has met them to then, `longest_seconds`
    their longest step beyond the longest before; None where all start.
    """

    way: str
    copied_mb: float
    held_mb: float
    line_seconds: float
    heal_seconds: float
    total_seconds: float
    wire_mb: float
    lost_percent: float | None
    longest_seconds: float | None


def measure(options: Options, tell: Callable[[str], None]) -> list[Row]:
    """Return a row per way, medians of the repeats. RunFailed, TestbedUnavailable."""
    found: dict[str, list[Row]] = {}
    with (
        Testbed(options.num_clusters, None) as bed,
        tempfile.TemporaryDirectory(prefix="dsx-heal-") as place,
    ):
        bed.throttle(Line(options.mbit))
        for row in Bench(options, bed, Path(place), tell).rows():
            found.setdefault(row.way, []).append(row)
    return [_median(rows) for rows in found.values()]


class Bench:
    """One run, from its start to its end."""

    def __init__(
        self, options: Options, bed: Testbed, place: Path, tell: Callable[[str], None]
    ) -> None:
        self._options, self._bed, self._tell = options, bed, tell
        self._run = Run(_job(options, bed, place), bed, options.deadline_seconds)
        *self._others, self._victim = self._run.clusters

    def rows(self) -> Iterator[Row]:
        """Yield a row for each time that a cluster, or all, came back."""
        run, calm = self._run, _CALM_PERIODS * self._options.interval
        for cluster in run.clusters:
            run.start(cluster)
        run.wait_for_step(0, calm + self._options.interval)
        for repeat in range(self._options.repeats):
            for way in (HEAL, OWN):
                if way == OWN:
                    self._save()
                row = self._come_back(way)
                self._tell(f"{repeat + 1}/{self._options.repeats} {say(row)}")
                yield row
                run.wait_for_step(0, run.last_step() + calm + self._options.interval)
        self._save()
        for repeat in range(self._options.repeats):
            row = self._restart()
            self._tell(f"{repeat + 1}/{self._options.repeats} {say(row)}")
            yield row
        run.order(last_step=run.last_step() + self._options.interval)
        run.wait_for_ends()

    def _save(self) -> None:
        step = self._run.last_step() + max(4, round(2 / self._options.step_seconds))
        self._run.order(save_at=step)
        for cluster in self._run.clusters:
            self._run.wait_for_step(cluster, step + 1)

    def _come_back(self, way: str) -> Row:
        """Kill the victim, let the others go on for some steps, and start it again."""
        run, options = self._run, self._options
        before = {m: run.steps(m)[-_CALM_PERIODS * options.interval :] for m in self._others}
        killed_at = before[0][-1]["at"]
        run.kill([self._victim])
        gone = run.wait_for_members(0, self._others, killed_at)
        run.wait_for_step(0, gone["step"] + min(options.interval // 2, _AWAY_STEPS))
        received = self._bed.traffic(self._victim).bytes_received
        started = run.start(self._victim, loads=way == OWN)
        met = run.wait_for("met", self._victim, started)["at"]
        healed = run.wait_for("healed", self._victim, started)
        back = max(run.wait_for_members(m, run.clusters, healed["at"])["at"] for m in self._others)
        wire = self._bed.traffic(self._victim).bytes_received - received
        lost = [cost(before[m], run.steps(m, met), back - met) for m in self._others]
        return Row(
            way, healed["copied_bytes"] / 1e6, healed["held_bytes"] / 1e6,
            8 * healed["copied_bytes"] / (_ETHERNET * options.mbit * 1e6), healed["seconds"],
            back - started, wire / 1e6, max(p for p, _ in lost), max(s for _, s in lost),
        )  # fmt: skip

    def _restart(self) -> Row:
        """Kill all, and start all from the checkpoint."""
        run = self._run
        run.kill(run.clusters)
        received = self._bed.traffic(0).bytes_received
        started = [run.start(cluster, loads=True) for cluster in run.clusters]
        ends = [run.wait_for("step", m, since)["at"] for m, since in enumerate(started)]
        wire = self._bed.traffic(0).bytes_received - received
        return Row(RESTART, 0.0, 0.0, 0.0, 0.0, max(ends) - started[0], wire / 1e6, None, None)


def cost(before: Sequence[Record], steps: Sequence[Record], window: float) -> tuple[float, float]:
    """Return what steps of a window have lost of it, in percent, and the longest beyond `before`.

    The window is in seconds, from the first of `steps`.
    """
    within = [r for r in steps if r["at"] <= steps[0]["at"] + window] if steps else []
    if not within:
        return 0.0, 0.0
    usual = fmean(r["seconds"] for r in before)
    lost = sum(r["seconds"] - usual for r in within)
    longest = max(r["seconds"] for r in within) - max(r["seconds"] for r in before)
    return 100 * lost / window, longest


def say(row: Row) -> str:
    """Say a row in a line."""
    lost = "" if row.lost_percent is None else f", the others lost {row.lost_percent:.2f} %"
    return (
        f"{row.way}: {row.copied_mb:.1f} MB copied and {row.held_mb:.1f} MB there in "
        f"{row.heal_seconds:.1f} s, back after {row.total_seconds:.1f} s{lost}"
    )


def _median(rows: Sequence[Row]) -> Row:
    def of(name: str) -> float | None:
        values = [getattr(row, name) for row in rows]
        return None if values[0] is None else median(values)

    names = [name for name in Row.__dataclass_fields__ if name != "way"]
    return Row(rows[0].way, **{name: of(name) for name in names})  # type: ignore[arg-type]


def _job(options: Options, bed: Testbed, place: Path) -> Job:
    runner = Runner(bed, shared_cores(options.num_clusters), options.deadline_seconds)
    return Job(
        str(place), *runner.meeting(KINDS["link/curve"], place), options.num_layers, options.width,
        options.interval, options.step_seconds, options.heal_rate_mbit, _SUSPECT_SECONDS,
    )  # fmt: skip
