"""What a configuration does round by round, and which launch commands let it."""

from __future__ import annotations

from pathlib import Path

from dsx.comm.address import parse_address
from dsx.config.schema import DsxConfig
from dsx.support.doctor.finding import Finding
from dsx.support.doctor.planned import Planned, first_stage
from dsx.support.doctor.rounds import LEGEND, draw, period_of, transfers_of


def picture(config: DsxConfig, planned: Planned | None) -> list[str]:
    """Return a period in words and characters; ValueError for fragments that cannot be."""
    method = config.method
    numels, stage, where = first_stage(method, planned)
    method.validate(config.clusters.num_clusters, num_fragments=len(numels))
    period = period_of(method)
    transfers = transfers_of(method, numels, stage, period.last)
    scale = period.steps_per_column
    each = "a step" if scale == 1 else f"{scale} steps"
    return [
        f"Steps {period.first} to {period.last}{where}; a character is {each}:",
        f"  {LEGEND}",
        *(f"  {line}" for line in draw(transfers, len(numels), period)),
        *(f"  {line}" for line in _words(config)),
    ]


def _words(config: DsxConfig) -> list[str]:
    """Return what the picture cannot tell."""
    method, steps = config.method, config.method.schedule.interval
    late = method.delay.rounds_under_way
    if late:
        rounds = "round" if late == 1 else "rounds"
        said = [f"a mean is applied {late} {rounds} after its launch; training goes on meanwhile"]
    elif method.delay.uses_seconds:
        said = [f"a mean is applied when the line has carried it, at most {steps // 2} steps after "
                "its launch, behind training"]  # fmt: skip
    elif method.delay.steps:
        said = [f"a mean is applied {method.delay.steps} steps after its launch, behind training"]
    elif method.schedule.when is not None:
        said = ["layers leave inside the backward, and are applied at the end of the same step"]
    else:
        said = ["training waits at each @ until the mean has come"]
    if method.schedule.uses_seconds or method.delay.uses_seconds:
        said.append("the first period; the next ones follow the times that the run measures")
    if method.control.moves(method.sync_params):
        said.append(f"{config.axes['control']['type']} may change H, {steps} at first, or the rank")
    return said


def look_at_launch(config: DsxConfig, source: Path) -> Finding:
    """Say by which commands a "dsx" block is heard, and that it is not by others."""
    clusters = config.clusters
    is_json = source.suffix == ".json"
    start = (
        f"deepspeed --num_gpus N --module dsx.run SCRIPT --dsx-config {source}"
        if is_json
        else "torchrun --nproc-per-node N -m megatron_patches pretrain_gpt.py (these flags)"
    )
    if clusters.rendezvous == "env://":
        how = f"one launcher over all {clusters.num_clusters} clusters: `{start}`"
    else:
        numbers = f"M = 0 to {clusters.num_clusters - 1}"
        own = "" if clusters.cluster_id is not None else " --dsx-cluster-id M"
        how = f"one launcher per cluster, {numbers}: `{start}{own}`"
        if clusters.store == "standalone":
            port = parse_address(clusters.rendezvous)[1]
            how += f", after `dsx rendezvous --port {port}`"
    outside = (
        "outside of dsx.run and of dsx.initialize, dsx.attach or dsx.attach_megatron in the script "
        'nothing of dsx runs: the "dsx" block is ignored without a word'
    )
    return Finding("note", "launch", f"{how}; {outside}")
