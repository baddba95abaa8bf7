"""The checks of `dsx bench gpu`, each returning rows of the table."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsx.bench.codec import BenchOptions, CodecFigures, best_seconds, measure_codecs
from dsx.bench.e2e.run import RunFailed
from dsx.bench.gpu.job import NUM_CLUSTERS, SHORT, Job
from dsx.bench.gpu.own_cost import OwnCost
from dsx.bench.gpu.runs import Machine, in_turns, run
from dsx.bench.gpu.table import Row
from dsx.bench.launch import measure_launches
from dsx.config.schema import preset
from dsx.core.units import format_bytes

_MOST_OVERHEAD, _LEAST_BANDWIDTH, _MOST_MEMORY_OFF = 0.01, 0.60, 0.05
_INT4 = {"type": "quantized", "wire": "int4", "error_feedback": "fp32"}
_REPEATS = 5
_FALL = 0.7  # of the loss, by the last steps
_NEEDED = {"deepspeed": "deepspeed", "megatron": "megatron.core", "torch_apex": "amp_C"}
_ON_ALL = ("recommended", "dilocox")  # of engines; the rest on plain torch


def require(engine: str) -> str | None:
    """Return what an engine needs and is not installed here, or None."""
    for prefix, module in _NEEDED.items():
        if engine.startswith(prefix):
            parts = module.split(".")
            found = all(
                importlib.util.find_spec(".".join(parts[: end + 1])) for end in range(len(parts))
            )
            return None if found else module
    return None


def trained(machine: Machine, folder: Path, at_once: int, engines: Sequence[str]) -> Iterator[Row]:
    """Let plain PyTorch train by every preset, and other engines by those of all."""
    device = "cuda" if machine.gpus else "cpu"
    jobs: list[Job] = []
    for engine in engines:
        if missing := require(engine):
            yield Row("trains", engine, "installed", f"no module {missing}", "not run")
            continue
        names = SHORT if engine == "torch" else _ON_ALL
        jobs += [Job(engine, name, device) for name in names]
        if engine == "torch":
            jobs += [Job("torch", "streaming_diloco", device, state) for state in ("host", "disk")]
    calls = [partial(_train, job, machine, folder) for job in jobs]
    if "torch" in engines:
        calls.insert(0, partial(_resume, machine, folder, device))
    for rows in in_turns(calls, at_once):
        yield from rows


def _train(job: Job, machine: Machine, folder: Path) -> list[Row]:
    place = "" if job.state == "masters" else f", state on {job.state}"
    what = f"{job.engine}, {job.preset}{place}"
    wanted = "loss falls, equal averages"
    wanted += "" if _waits(job) else ", no waiting for the device"
    name = f"{job.engine}-{job.preset}-{job.state}"
    try:
        clusters = run(job, machine, folder / name)
    except RunFailed as failure:
        (folder / name / "failure.txt").write_text(str(failure))
        return [Row("trains", what, wanted, str(failure)[-300:], "failed")]
    return [Row("trains", what, wanted, *_judge(job, clusters))]


def _resume(machine: Machine, folder: Path, device: str) -> list[Row]:
    """Save in the middle, end, start again, and compare with a run that was left alone."""
    job = Job("torch", "recommended", device)
    middle = job.steps // 2
    wanted = "the averages of a run that was left alone, bit for bit"
    try:
        whole = run(replace(job, saves_at=2 * job.steps), machine, folder / "left-alone")
        run(replace(job, saves_at=middle), machine, folder / "saved")
        resumed = run(replace(job, loads=str(folder / "saved")), machine, folder / "resumed")
    except RunFailed as failure:
        return [Row("resumes", f"at step {middle}", wanted, str(failure)[-300:], "failed")]
    averages = [[rank["average"] for rank in cluster] for cluster in (*whole, *resumed)]
    is_right = averages[: len(whole)] == averages[len(whole) :]
    told = f"averages {averages[0][0]} and {averages[-1][0]}"
    what = f"{job.engine}, {job.preset}, at step {middle} of {job.steps}"
    return [Row("resumes", what, wanted, told, "ok" if is_right else "failed")]


def _waits(job: Job) -> bool:
    """Whether launches read the device by design: for codes at once, or a state on the host."""
    return job.state != "masters" or preset(job.preset, NUM_CLUSTERS).waits_for_codes


def _judge(job: Job, clusters: Sequence[Sequence[dict[str, Any]]]) -> tuple[str, Any]:
    """Return what ranks have seen in words, and whether that is right."""
    ranks = [rank for cluster in clusters for rank in cluster]
    first = ranks[0]
    curves = [rank["losses"] for rank in ranks]
    is_finite = all(math.isfinite(loss) for curve in curves for loss in curve)
    is_falling = all(sum(curve[-4:]) / 4 < _FALL * curve[0] for curve in curves)
    last = sum(sum(curve[-4:]) / 4 for curve in curves) / len(curves)
    begun = sum(curve[0] for curve in curves) / len(curves)
    apart = [
        rank for rank in range(len(clusters[0]))
        if len({cluster[rank]["average"] for cluster in clusters}) > 1
    ]  # fmt: skip
    syncs: dict[str, int] = {}
    for rank in ranks:
        for place, count in rank["syncs"].items():
            syncs[place] = syncs.get(place, 0) + count
    off = first["given_bytes"] / first["planned_bytes"] - 1 if first["planned_bytes"] else 0.0
    may_wait = _waits(job)
    told = [
        f"loss {begun:.2f} to {last:.2f}", f"{first['num_rounds']} rounds",
        f"{first['backend']} inside", f"memory {100 * off:+.1f} % of plan",
    ]  # fmt: skip
    told += [f"averages of rank {apart[0]} differ"] if apart else []
    told += [f"waits for the device at {', '.join(f'{p} ({n})' for p, n in syncs.items())}"] * bool(
        syncs
    )
    is_right = (
        is_finite and is_falling and not apart and first["num_rounds"]
        and (may_wait or not syncs)
        and abs(off) <= _MOST_MEMORY_OFF
    )  # fmt: skip
    return ", ".join(told), "ok" if is_right else "failed"


def copies(numel: int = 2**28) -> list[Row]:
    """Measure what the device's memory and its line to the host carry, in GB/s."""
    x, y = (torch.zeros(numel, device="cuda") for _ in range(2))
    pinned = torch.empty(numel, pin_memory=True)
    calls: dict[str, Callable[[], object]] = {
        "in its memory": lambda: y.copy_(x),  # which reads and writes
        "to the host": lambda: pinned.copy_(x),
        "from the host": lambda: x.copy_(pinned),
    }
    for call in calls.values():
        call()
    rows: list[Row] = []
    for what, seconds in best_seconds(calls, _REPEATS, x.device).items():
        moved = (8 if what == "in its memory" else 4) * numel
        told = f"{moved / seconds / 1e9:,.0f} GB/s"
        rows.append(Row("copies", f"{what}, {format_bytes(4 * numel)}", "", told, "seen"))
    return rows


def codecs(formats: str = "int4,int8,2bit", numel: int = 2**28) -> list[Row]:
    """Measure the codecs' kernels on the device against its memory's bandwidth."""
    options = BenchOptions.parse(formats, numel, "auto", None, _REPEATS)
    rows: list[Row] = []
    for figure in measure_codecs(options, on=["cuda"]):
        for operation in ("encode", "decode", "encode_ef"):
            share = _share_of_bandwidth(figure, operation)
            rate = f"{figure.speeds[operation]:,.0f} GB/s of fp32"
            seen = f"{rate}, {100 * share:.0f} % ({figure.kernels})"
            wanted = f"{100 * _LEAST_BANDWIDTH:.0f} % of the memory's bandwidth"
            outcome = "ok" if share >= _LEAST_BANDWIDTH else "failed"
            rows.append(
                Row("codec on the device", f"{figure.format} {operation}", wanted, seen, outcome)
            )
    return rows


def _share_of_bandwidth(figure: CodecFigures, operation: str) -> float:
    """Return the bytes that an operation has to move, by the copy's, times how fast it was.

    Encoding with feedback reads and writes both the vector and the residual.
    """
    moved = (16 if operation == "encode_ef" else 4) + figure.bytes_per_element
    return moved / 8 * figure.percent(operation) / 100


def launches(numel: int = 2**26) -> list[Row]:
    """Measure what a launch takes of the training thread."""
    rows: list[Row] = []
    for codec in ({"type": "dense"}, {"type": "quantized", "wire": "int4"}):
        (figure,) = measure_launches([numel], "cuda", [codec], _REPEATS)
        seen = f"{figure.launch_ms:.2f} ms, of them {figure.copy_ms:.2f} to start its kernels"
        rows.append(Row("launch", f"{numel:,} elements, {figure.compression}", "", seen, "seen"))
    return rows


def own_cost(machine: Machine, folder: Path) -> list[Row]:
    """Measure what dsx takes of the training thread and of the device."""
    rows: list[Row] = []
    device = "cuda" if machine.gpus else "cpu"
    for name, overrides in (
        ("recommended", {"schedule": {"interval": 16}}),
        ("diloco_delayed", {"schedule": {"interval": 16}, "compression": _INT4}),
    ):
        job = Job("torch", name, device, num_clusters=1, overrides=overrides)
        try:
            ((found,),) = run(
                job, machine, folder / f"overhead-{name}", "own_cost", ranks=1, threads=4
            )
        except RunFailed as failure:
            rows.append(Row("overhead", name, "", str(failure)[-300:], "failed"))
            continue
        rows += _rows_of_cost(name, OwnCost(**found))
    return rows


def _rows_of_cost(preset: str, cost: OwnCost) -> list[Row]:
    what = f"{preset}, {cost.num_parameters / 1e6:,.0f} M parameters, H = {cost.interval}"
    without = 1000 * sum(cost.without) / len(cost.without)
    again = 1000 * sum(cost.again) / len(cost.again)
    attached = 1000 * sum(cost.attached) / len(cost.attached)
    seen = (
        f"{100 * cost.overhead:+.2f} % ({without:.1f} ms a step, {attached:.1f} with dsx, "
        f"{again:.1f} without again), {1000 * cost.blocked_seconds:.2f} ms a step in dsx"
    )
    is_right = cost.overhead <= _MOST_OVERHEAD
    rows = [Row("overhead", what, "under 1 % of a step", seen, "ok" if is_right else "failed")]
    planned, held = cost.planned_bytes, cost.held_bytes
    off = held / planned - 1 if planned else 0.0
    told = (
        f"{format_bytes(held)} held of {format_bytes(planned)} planned ({100 * off:+.1f} %), "
        f"{format_bytes(cost.peak_bytes)} more at the peak of a step"
    )
    is_right = abs(off) <= _MOST_MEMORY_OFF
    return [
        *rows,
        Row("device memory", what, "within 5 % of the plan", told, "ok" if is_right else "failed"),
    ]
