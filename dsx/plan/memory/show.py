"""What `dsx memory` shows: read a model and a cluster from flags, predict, and say what fits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsx.config.flags import block_of_flags
from dsx.config.schema import DsxConfig, load_config
from dsx.core.types import Stage
from dsx.core.units import format_bytes
from dsx.method.fragments import assign_stage, fewer_than_usual
from dsx.plan.memory.plan import RankMemory, plan_stage
from dsx.plan.model_files import ModelFiles, read_model, read_words, require_served
from dsx.plan.stage_weights import stage_shapes

_GIB = 2**30


@dataclass(frozen=True)
class Planned(ModelFiles):
    """What the files say: the model, one cluster, the method."""

    config: DsxConfig


def read_plan(source: Path, model_flags: Path | None, ranks: int | None) -> Planned:
    """Read a file of Megatron flags, or a DeepSpeed JSON beside one for the model.

    ValueError for what is missing or does not go together.
    """
    found = read_model(source, model_flags, ranks)
    is_json = source.suffix == ".json"
    config = load_config(source if is_json else block_of_flags(read_words(source)))
    require_served(config.method, found.cluster)
    return Planned(found.model, found.cluster, found.batch, config)


def show_memory(planned: Planned, limit_gib: float, as_json: bool, console: Console) -> bool:
    """Print a table, or JSON, of the first, a middle and the last stage; return whether all fit."""
    count = planned.cluster.pipeline
    stages = [Stage(i, count) for i in sorted({0, count // 2, count - 1})]
    ranks = [
        plan_stage(planned.model, planned.cluster, stage, planned.config, planned.batch)
        for stage in stages
    ]
    fits = [rank.on_device <= limit_gib * _GIB for rank in ranks]
    if as_json:
        rows = [_record(r) | {"fits": f} for r, f in zip(ranks, fits, strict=True)]
        console.print_json(json.dumps({"limit_gib": limit_gib, "ranks": rows}))
    else:
        _print(planned, ranks, fits, limit_gib, console)
    return all(fits)


def _print(
    planned: Planned,
    ranks: Sequence[RankMemory],
    fits: Sequence[bool],
    limit: float,
    console: Console,
) -> None:
    cluster, config = planned.cluster, planned.config
    console.print(
        f"{planned.model.in_words}; {config.clusters.num_clusters} clusters of {cluster.ranks} "
        f"ranks ({cluster}); {config.preset}, outer state {config.state.where}",
        soft_wrap=True,
    )
    if fewer := fewer_than_usual(config.method.fragments, _fragments_of_stages(planned)):
        console.print(fewer)
    table = Table(title=f"GiB per rank, of {limit:g}", title_justify="left")
    table.add_column("")
    for rank in ranks:
        table.add_column(f"stage {rank.stage.index}", justify="right")

    def row(name: str, values: Sequence[int]) -> None:
        table.add_row(name, *(f"{value / _GIB:.2f}" for value in values))

    for field in dataclasses.fields(ranks[0].inner):
        name = field.name if field.name != "activations" else "activations (estimate)"
        row(name, [getattr(rank.inner, field.name) for rank in ranks])
    row("outer training, device", [rank.outer_on_device for rank in ranks])
    row("device, all", [rank.on_device for rank in ranks])
    table.add_section()
    row("outer training, host", [rank.outer_on_host for rank in ranks])
    if config.state.device == "disk":
        row("outer training, disk", [rank.outer_on_disk for rank in ranks])
    console.print(table)
    console.print(f"outer state of stage 0: {ranks[0].outer}")
    if most := max(rank.lent for rank in ranks):
        console.print(lent_in_words(most), soft_wrap=True)
    parity = "fits" if all(fits) else "does not fit"
    console.print(f"{parity} in {limit:g} GiB per accelerator")
    if not all(fits) and config.state.device == "masters":
        console.print('"state": {"device": "host"} moves the outer state to pinned host memory')


def lent_in_words(num_bytes: int) -> str:
    """Say when a rank's launches are lent so many bytes."""
    return (
        f"{format_bytes(num_bytes)} of host memory more for a while, where a boundary is left for "
        "a stop or a round is made again"
    )


def _fragments_of_stages(planned: Planned) -> list[int]:
    count, fragmenter = planned.cluster.pipeline, planned.config.method.fragments
    stages = [Stage(index, count) for index in range(count)]
    shapes = [stage_shapes(planned.model, planned.cluster, stage) for stage in stages]
    return [len(assign_stage(fragmenter, own, at)) for own, at in zip(shapes, stages, strict=True)]


def _record(rank: RankMemory) -> dict[str, Any]:
    return {
        "stage": rank.stage.index,
        "parameters": rank.numel,
        "inner": vars(rank.inner),
        "outer": vars(rank.outer),
        "contributions": rank.contributions,
        "on_device": rank.on_device,
        "outer_on_device": rank.outer_on_device,
        "outer_on_host": rank.outer_on_host,
        "outer_on_disk": rank.outer_on_disk,
        "copied_for_save": rank.copied_for_save,
        "lent": rank.lent,
    }
