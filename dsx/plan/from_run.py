"""What a run's records tell of its step, its line and its codec: what `dsx plan --from-run` reads.

- A step: the median of `seconds` less `blocked_seconds`, of steps in which nothing was sent or
  applied, so that launches, waits and outer steps are not in it; the first two are left out.
- The line: payload of all fragments launched at one boundary over the longest of their
  `transfer_seconds` less `coding_seconds` and `turn_seconds`; of all boundaries the largest. A
  cluster that codes slowly is waited for in those seconds, so it is at least this: the line may be
  faster.
- Coding: `coding_seconds` of a transfer per element of a rank; awaited copies and sums are in it,
  waits for cores are not: the timeline queues transfers for them itself. It is of the run's own
  codec, whose speed a plan takes from it (coding.py).
- The training thread's own work at launch and apply: what `blocked_seconds` holds beyond the waits.

Latency is not in the records: it is part of a transfer's seconds, and of no other number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from dsx.compress.base import Compressor
from dsx.core.types import ParameterShape
from dsx.method.choices import AXES
from dsx.telemetry.run_folder import Record, Run, open_run

_WARM_UP = 2


@dataclass(frozen=True)
class RunFigures:
    """One run in numbers; None where its records do not tell.

    `parameters` are empty for a pipeline, of which only the sizes of fragments are known. Rates are
    payload, one way; `num_steps` are the quiet ones.
    """

    preset: str
    num_clusters: int
    ranks: int
    stages: int
    parameters: tuple[ParameterShape, ...]
    fragment_numels: tuple[tuple[int, ...], ...]  # by stage
    codec: str  # as configurations name it
    compression: Compressor
    step_seconds: float
    payload_bits_per_second: float | None
    coding_seconds_per_element: float | None
    blocking_seconds_per_element: float | None
    num_steps: int
    num_syncs: int
    coding_cores: int | None = None  # the budget of its first rank


def read_run(path: Path) -> RunFigures:
    """Read all clusters' records; ValueError for what is missing, and how to get it.

    FileNotFoundError where the path means no run (telemetry/run_folder.py).
    """
    run = open_run(path)
    start = _start(run)
    syncs = [part.syncs for part in run.clusters]
    steps = [part.steps for part in run.clusters]
    pairs = list(zip(steps, syncs, strict=True))
    quiet = [seconds for s, y in pairs for seconds in _quiet_steps(s, y)]
    if not quiet:
        raise ValueError(
            f"{run.directory} has no step beyond the first {_WARM_UP} without a sync: let the run "
            "take more steps between syncs"
        )
    ranks, stages = int(start["ranks"]), int(start["stages"])
    return RunFigures(
        preset=start["preset"],
        num_clusters=int(start["num_clusters"]),
        ranks=ranks,
        stages=stages,
        parameters=_parameters(start) if stages == 1 else (),
        fragment_numels=_fragment_numels(syncs[0], stages),
        codec=start["axes"]["compression"]["type"],
        compression=_compression(start["axes"]["compression"]),
        step_seconds=median(quiet),
        payload_bits_per_second=max((r for y in syncs for r in _rates(y)), default=None),
        coding_seconds_per_element=_coding_seconds(syncs, ranks // stages),
        blocking_seconds_per_element=_median(
            seconds * ranks / stages for s, y in pairs for seconds in _blocking(s, y)
        ),
        num_steps=len(quiet),
        num_syncs=sum(len(y) for y in syncs),
        coding_cores=start.get("coding_cores"),
    )


def _start(run: Run) -> Record:
    starts = [part.start for part in run.clusters if part.start is not None]
    if not starts:
        raise ValueError(
            f'{run.directory} has no "start" record, which runs write since dsx plan reads them: '
            "run some rounds with this version, or give the sizes by --params and --layers"
        )
    return starts[-1]


def _quiet_steps(steps: Iterable[Record], syncs: Iterable[Record]) -> list[float]:
    busy = {s[key] for s in syncs for key in ("launched_step", "applied_step")}
    quiet = [s for s in steps if s["step"] not in busy]
    return [s["seconds"] - s["blocked_seconds"] for s in quiet if s["step"] > _WARM_UP]


def _rates(syncs: Iterable[Record]) -> list[float]:
    """Return payload bits per second of every boundary's launches, the first one left out."""
    by_launch: dict[int, list[Record]] = defaultdict(list)
    for sync in syncs:
        by_launch[sync["launched_step"]].append(sync)
    rates: list[float] = []
    for step in sorted(by_launch)[1:]:
        own = by_launch[step]
        seconds = max(_of_messages(sync) for sync in own)
        if seconds > 0:
            rates.append(8 * sum(s["bytes_sent"] for s in own) / seconds)
    return rates


def _of_messages(sync: Record) -> float:
    held = sync.get("coding_seconds", 0.0) + sync.get("turn_seconds", 0.0)
    return sync["transfer_seconds"] - held


def _compression(block: Mapping[str, Any]) -> Compressor:
    """Return the run's own codec; keys that an earlier or later version has are left out."""
    choices = AXES["compression"].choices
    if block["type"] not in choices:
        raise ValueError(
            f"the run's compression.type={block['type']!r} is not known here; allowed: "
            f"{', '.join(choices)}. Import what registers it"
        )
    kind = choices[block["type"]]
    values = {f.name: block[f.name] for f in fields(kind) if f.name in block}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _coding_seconds(by_cluster: Iterable[Iterable[Record]], ranks_per_stage: int) -> float | None:
    """Return seconds per element of a rank: a sync's elements are those of one stage."""
    return _median(
        sync["coding_seconds"] * ranks_per_stage / sync["numel"]
        for syncs in by_cluster
        for sync in syncs
        if "coding_seconds" in sync and sync["numel"]
    )


def _blocking(steps: Iterable[Record], syncs: Iterable[Record]) -> list[float]:
    """Return seconds per element, of steps at which what was launched is applied, or one round.

    Steps are recorded by rank 0, so of a pipeline the first stage's syncs count alone.
    """
    applied: dict[int, list[Record]] = defaultdict(list)
    for sync in syncs:
        if sync.get("stage", 0) == 0:
            applied[sync["applied_step"]].append(sync)
    found: list[float] = []
    for step in steps:
        own = applied.get(step["step"], [])
        numel = sum(s["numel"] for s in own)
        if numel and step["step"] > _WARM_UP:
            waited = sum(s["wait_seconds"] for s in own)
            found.append(max(step["blocked_seconds"] - waited, 0.0) / numel)
    return found


def _fragment_numels(syncs: Iterable[Record], num_stages: int) -> tuple[tuple[int, ...], ...]:
    sizes = {(s.get("stage", 0), s["fragment"]): int(s["numel"]) for s in syncs}
    return tuple(
        tuple(sizes[key] for key in sorted(sizes) if key[0] == stage) for stage in range(num_stages)
    )


def _parameters(start: Record) -> tuple[ParameterShape, ...]:
    """Return the parameters, fragments one after another; their names tell the layers."""
    return tuple(
        ParameterShape(name, tuple(shape))
        for of_fragment in start["parameters"]
        for name, shape in of_fragment.items()
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
