"""What a configuration will take of this machine, and of a line, where the model is told."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dsx.config.files import ConfigError, require_folder
from dsx.config.schema import DsxConfig
from dsx.core.types import Stage
from dsx.core.units import format_bytes
from dsx.method.fragments import usual_count
from dsx.method.method import Method
from dsx.outer.mapped import MappedMemory
from dsx.plan import inner_memory
from dsx.plan.candidates import Question
from dsx.plan.launches import require_planned
from dsx.plan.memory.plan import RankMemory, plan_stage
from dsx.plan.model import PlannedModel, from_files
from dsx.plan.model_files import Cluster, ModelFiles, require_served
from dsx.plan.predict import predict_traffic
from dsx.plan.traffic import Traffic
from dsx.plan.variants import with_backwards
from dsx.support.doctor.finding import Finding

_GIB = 2**30
_LAYERS = 8  # of a picture where nobody has told the model's
_NEEDS_MODEL = "is known where the model is told: --model FILE and --ranks N, as for dsx memory"


@dataclass(frozen=True)
class Planned:
    """A model as a run would cut it, and what each stage's largest rank holds."""

    files: ModelFiles
    model: PlannedModel
    ranks: list[RankMemory]

    def checkpoint_bytes(self, method: Method) -> int:
        """Return a cluster's checkpoint: weights, masters and moments once, and the outer state.

        With the transfers that are under way at a time, which are saved, too.
        """
        inner = _whole(self.files.cluster, self.model.numel)
        per_stage = self.files.cluster.ranks // self.files.cluster.pipeline
        kept = ("anchor", "outer_optimizer", "delay", "staleness", "codec")
        outer = sum(getattr(rank.outer, name) for rank in self.ranks for name in kept)
        steps, interval = method.delay.steps, method.schedule.interval
        most = interval // 2 if steps == "auto" else steps
        share = method.delay.rounds_under_way or most / interval
        sent = sum(rank.outer.transfers for rank in self.ranks) * share / method.max_in_flight
        return inner.weights + inner.masters + inner.moments + per_stage * round(outer + sent)


def _whole(cluster: Cluster, numel: int) -> inner_memory.InnerMemory:
    """Return the inner state of a model that one rank would hold."""
    if cluster.zero_stage is None:
        return inner_memory.megatron(numel, cluster.is_bf16)
    return inner_memory.deepspeed(numel, cluster.is_bf16, cluster.zero_stage, 1)


def plan(config: DsxConfig, files: ModelFiles) -> Planned:
    """Cut a model by a configuration; ValueError, with the fix, where a run would refuse it."""
    require_served(config.method, files.cluster)
    count = files.cluster.pipeline
    ranks = [
        plan_stage(files.model, files.cluster, Stage(index, count), config, files.batch)
        for index in range(count)
    ]
    return Planned(files, from_files(files), ranks)


def first_stage(method: Method, planned: Planned | None) -> tuple[list[int], Stage, str]:
    """Return the elements of each fragment of the first stage, that stage, and what to say of it.

    Without a model the sizes are 1.
    """
    if planned is not None:
        loads = planned.model.loads(method.fragments, method.compression)
        stage = Stage(0, planned.files.cluster.pipeline)
        where = "" if stage.count == 1 else f", of the first of {stage.count} pipeline stages"
        return [load.numel for load in loads if load.stage == 0], stage, where
    count = usual_count(method.fragments)
    if count is None:
        return [1] * _LAYERS, Stage(), f", of a model of {_LAYERS} layers, say: --model tells yours"
    return [1] * count, Stage(), ""


def look_at_memory(planned: Planned | None, limit: float | None, gpu: float | None) -> Finding:
    """Compare what a rank will hold with `limit` GiB, or with those of the smallest GPU seen."""
    if planned is None:
        return Finding("note", "memory", f"what a rank will hold {_NEEDS_MODEL}")
    most = max(planned.ranks, key=lambda rank: rank.on_device)
    text = (
        f"a rank will hold {most.on_device / _GIB:.3g} GiB on its accelerator "
        f"({most.inner.total / _GIB:.3g} of the engine, {most.outer_on_device / _GIB:.3g} of dsx) "
        f"and {most.outer_on_host / _GIB:.3g} GiB on the host"
    )
    if most.outer_on_disk:
        text += f", {most.outer_on_disk / _GIB:.3g} GiB on disk"
    size = limit if limit is not None else gpu
    if size is None:
        return Finding("note", "memory", f"{text}; no GPU to compare it with: --limit GIB")
    if most.on_device <= size * _GIB:
        return Finding("ok", "memory", f"{text}, of {size:.3g} GiB on the accelerator")
    fix = (
        '"state": {"device": "host"} moves the outer state to the host'
        if most.inner.total <= size * _GIB and most.place == "masters"
        else "use more ranks, a higher ZeRO stage or more tensor and pipeline parallel ranks"
    )
    return Finding("STOP", "memory", f"{text}, more than the {size:.3g} GiB there are; {fix}")


def look_at_host_memory(planned: Planned, ranks_here: int, host: tuple[int, int] | None) -> Finding:
    """Compare what `ranks_here` ranks hold in host memory with what is free of it, and all."""
    each = max(rank.outer_on_host for rank in planned.ranks)
    needed = ranks_here * each
    text = (
        f"{ranks_here} ranks on this host will hold {needed / _GIB:.3g} GiB of its memory for dsx, "
        "beside the script's own"
    )
    if host is None:
        return Finding("note", "host", f"{text}; how much there is the system does not tell")
    free, whole = host
    text += f"; {free / _GIB:.3g} of {whole / _GIB:.3g} GiB are free"
    if needed > whole:
        fix = (
            'leave "state": {"device": "host"} out'
            if any(rank.place == "host" for rank in planned.ranks)
            else "use more hosts, or a stronger codec, whose contributions are smaller"
        )
        return Finding("STOP", "host", f"{text}; {fix}")
    if needed > free:
        return Finding("note", "host", f"{text}: end what else holds memory")
    return Finding("ok", "host", text)


def look_at_disk(config: DsxConfig, folder: Path, planned: Planned | None) -> list[Finding]:
    """Look at the space for checkpoints in `folder`, and at `metrics.dir`."""
    found: list[Finding] = []
    if config.metrics.dir is not None:
        found.append(_records(config.metrics.dir))
    try:
        require_folder("--checkpoints", str(folder))
    except ConfigError as error:
        return [*found, Finding("STOP", "disk", str(error))]
    there = _existing(folder)
    free = shutil.disk_usage(there).free
    text = f"{format_bytes(free)} are free for checkpoints in {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"checkpoints in {folder}: {there} cannot be written to; give another folder"
        return [*found, Finding("STOP", "disk", text)]
    if planned is None:
        return [*found, Finding("note", "disk", f"{text}; what one takes {_NEEDS_MODEL}")]
    size, keep = planned.checkpoint_bytes(config.method), config.checkpoints.keep
    text += f"; one takes about {format_bytes(size)} per cluster"
    if free < size:
        text += "; make room, or give another folder"
        return [*found, Finding("STOP", "disk", text)]
    fitting = int(free / size)
    if keep is None:
        text += f", all are kept, and {fitting} fit: checkpoints.keep deletes older ones"
        return [*found, Finding("note" if fitting < 10 else "ok", "disk", text)]
    if fitting < keep + 1:
        text += (
            f", and {keep} are kept beside the one that is written; make room, or lower "
            f"checkpoints.keep to {max(fitting - 1, 1)}"
        )
        return [*found, Finding("STOP" if fitting < 2 else "note", "disk", text)]
    return [*found, Finding("ok", "disk", f"{text}, and {keep} are kept")]


def look_at_state_folder(config: DsxConfig, planned: Planned, ranks_here: int) -> list[Finding]:
    """Compare what `ranks_here` ranks keep in `state.dir` with the room there, if they do."""
    folder = config.state.folder
    if folder is None:
        return []
    try:
        MappedMemory(folder)
    except ValueError as error:
        return [Finding("STOP", "state", f"dsx.{error}")]
    needed = ranks_here * max(rank.outer_on_disk for rank in planned.ranks)
    free = shutil.disk_usage(folder).free
    text = (
        f"{ranks_here} ranks on this host will keep {format_bytes(needed)} in {folder}, where "
        f"{format_bytes(free)} are free"
    )
    if needed > free:
        return [Finding("STOP", "state", f"{text}: make room, or name another folder")]
    return [Finding("ok", "state", text)]


def _records(directory: str) -> Finding:
    try:
        require_folder("dsx.metrics.dir", directory)
    except ConfigError as error:
        return Finding("STOP", "records", str(error))
    there = _existing(Path(directory))
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"dsx.metrics.dir={directory!r}: {there} cannot be written to; give another folder"
        return Finding("STOP", "records", text)
    return Finding("ok", "records", f"are written to {directory}, for dsx report and dsx trace")


def _existing(folder: Path) -> Path:
    """Return the folder, or the first one above it that is there."""
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())


def look_at_line(config: DsxConfig, planned: Planned, question: Question) -> Finding:
    """Say how much of the time a run computes on a line, as dsx plan would of this method."""
    try:
        require_planned(config.method)
    except ValueError as error:
        return Finding("note", "line", str(error))
    method = with_backwards(config.method, planned.files.micro_batches)
    loads = planned.model.loads(method.fragments, method.compression)
    traffic = Traffic(method, loads, config.clusters.num_clusters)
    found = predict_traffic(method, traffic, question.step_seconds, question.link, question.costs)
    link, seconds = question.link, question.step_seconds
    text = (
        f"{100 * found.utilization:.1f} % of the time is computing, at {seconds:g} s a step and "
        f"{link.bits_per_second / 1e9:.4g} Gbit/s, {1000 * link.latency_seconds:.3g} ms one way: "
        f"{found.steps_per_round} steps take {found.round_seconds:.4g} s, of which "
        f"{found.exposed_seconds:.3g} s wait for the line; {format_bytes(found.bytes_per_round)} "
        "are sent in them by a cluster"
    )
    if found.utilization < 0.5:
        return Finding("note", "line", f"{text}; dsx plan finds what this line carries")
    return Finding("ok", "line", text)
