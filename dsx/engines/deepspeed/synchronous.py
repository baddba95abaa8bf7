"""A run that begins from a checkpoint of plain DeepSpeed: of one world, trained without dsx.

`engine.load_checkpoint(directory)` finds no outer state there. Every cluster then takes weights,
optimizer states, learning rate schedule and counters as DeepSpeed loads them, and outer training
begins: anchors are these weights, `engine.dsx.step` is 0. `training_data` goes on where that run
was (data.py). All clusters must read the same files: what they have loaded is compared.

What DeepSpeed itself would load in part, or wrongly, without a word is refused here: between
ZeRO-0, 1 or 2, and 3, and into an engine with a schedule from a run without one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from dsx.checkpoint.checksums import MANIFEST, name_of
from dsx.checkpoint.tags import cluster_directory, complete_tags
from dsx.comm.world import World
from dsx.engines.cluster_collectives import from_first, gather_objects
from dsx.engines.deepspeed.data import loader_of
from dsx.engines.deepspeed.masters import locate
from dsx.engines.deepspeed.parameters import stepping_optimizer, trained_parameters
from dsx.engines.deepspeed.pickles import find_code
from dsx.engines.same_beginning import begin_alike, digest_states, plain_values
from dsx.training.handle import Handle

UNIVERSAL = "_universal"
MODEL_FILES = "*_model_states.pt"
OPTIMIZER_FILES = "*zero_pp_rank_*_optim_states.pt"  # ZeRO's; experts have others without it
logger = logging.getLogger(__name__)


def find_plain(handle: Handle, world: World, base: str | Path, wanted: str | None) -> Path | None:
    """Return the folder of a plain checkpoint that is to be loaded; None: take one of dsx.

    dsx's own come first. Collective over all clusters: ValueError or FileNotFoundError, in all of
    them, where one finds no plain checkpoint, or another, or the folder of one cluster of dsx's.
    """
    own = _look(Path(base), wanted, world.cluster_id)
    told = handle.gather(own)
    if any(holds_own for holds_own, _, _ in told) or not any(tag for _, tag, _ in told):
        return None
    if any(is_of_dsx for _, _, is_of_dsx in told):
        raise ValueError(
            f"{Path(base) / told[0][1]} is a checkpoint that dsx has saved, of one cluster: load "
            f"{Path(base).parent}, of which every cluster takes its own; to begin anew from the "
            "model alone, export it (dsx export)"
        )
    tags = [tag for _, tag, _ in told]
    if len(set(tags)) > 1:
        listed = ", ".join(f"cluster {m}: {tag or 'none'}" for m, tag in enumerate(tags))
        raise FileNotFoundError(
            f"the clusters do not find one checkpoint of plain DeepSpeed under {base} ({listed}): "
            "copy it to every site, with the file latest, or name it (tag=...)"
        )
    return Path(base) / tags[0]


def plain_beside(base: str | Path) -> str:
    """Say which plain checkpoint lies beside those of dsx, for where none of these will do."""
    _, tag, is_of_dsx = _look(Path(base), None, -1)
    if not tag or is_of_dsx:
        return ""
    return (
        f"; {Path(base) / tag} is of plain DeepSpeed: to begin from it once more, name it "
        f"(tag={tag!r})"
    )


def _look(base: Path, wanted: str | None, cluster: int) -> tuple[bool, str, bool]:
    """Return whether dsx's own are there, the tag of a plain one or "", and if dsx wrote that."""
    held = [tag for m in {0, cluster} for tag in complete_tags(cluster_directory(base, m))]
    names = {name_of(name) for name in held}
    holds_own = bool(names) if wanted is None else str(wanted) in names
    tag = str(wanted) if wanted is not None else _latest(base)
    tag = tag.removesuffix(UNIVERSAL)
    folders = [base / name for name in (tag, f"{tag}{UNIVERSAL}") if tag]
    is_there = any(any(folder.glob(MODEL_FILES)) for folder in folders)
    return holds_own, tag if is_there else "", any((f / MANIFEST).is_file() for f in folders)


def _latest(base: Path) -> str:
    for name in ("latest", "latest_universal"):
        if (base / name).is_file():
            return (base / name).read_text().strip()
    return ""


@dataclass(frozen=True)
class Plain:
    """What a plain checkpoint says of itself; `stage`: how its optimizer's states lie in files."""

    directory: Path
    is_universal: bool
    stage: str
    facts: Mapping[str, Any]

    @property
    def num_ranks(self) -> int:
        """Ranks that held the optimizer's states, of all stages."""
        return int(self.facts["dp_world_size"]) * int(self.facts["mp_world_size"])


def read_facts(directory: Path, own_tag: str) -> Plain:
    """Return the counters and settings of what DeepSpeed loads. Collective in the cluster.

    ValueError, on all ranks, for a file that cannot be read, or may run code.
    """
    folder = directory.with_name(own_tag)
    told = from_first(_read_facts(folder) if torch.distributed.get_rank() == 0 else None)
    if isinstance(told, str):
        raise ValueError(told)
    return Plain(directory, own_tag != directory.name, *told)


def _read_facts(directory: Path) -> tuple[str, dict[str, Any]] | str:
    files = sorted(directory.glob(MODEL_FILES))
    common = [file for file in files if not file.name.startswith("layer_")]
    if not common:
        return f"{directory} has no file with the counters of a DeepSpeed checkpoint"
    if trouble := find_code(common[:1]):
        return trouble
    state = torch.load(common[0], map_location="cpu", weights_only=False, mmap=True)
    keys = ("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version")
    facts = {key: state.get(key) for key in keys}
    config = state.get("ds_config")
    facts["config"] = {
        key: cast("Mapping[str, Any]", config).get(key) if isinstance(config, Mapping) else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    }
    facts["has_schedule"] = state.get("lr_scheduler") is not None
    stage = "0"
    if any(directory.glob(OPTIMIZER_FILES)):
        stage = "3" if common[0].name.startswith("zero_pp_rank_") else "1 or 2"
    return stage, facts


def require_loadable(engine: Any, handle: Handle, plain: Plain, takes_schedule: bool) -> None:
    """Raise ValueError for what DeepSpeed would load in part, or wrongly, and where it is late."""
    if handle.step:
        raise ValueError(
            f"{plain.directory} is a checkpoint of plain DeepSpeed, from which a run begins, and "
            f"this one has taken {handle.step} step(s) across clusters: load it before the first "
            "step, into a new engine"
        )
    if takes_schedule and engine.lr_scheduler is not None and not plain.facts["has_schedule"]:
        raise ValueError(
            f"{plain.directory} holds no learning rate schedule, and this run has one: leave it "
            "out, or load with load_lr_scheduler_states=False, and it begins at its first step"
        )
    own = _stage_of(engine)
    if plain.is_universal or plain.stage == own:
        return
    raise ValueError(
        f"{plain.directory} was saved with ZeRO-{plain.stage}, and this run has "
        f"zero_optimization.stage={engine.zero_optimization_stage()}: DeepSpeed converts no "
        "optimizer states between ZeRO-0, 1 or 2, and 3; keep the stage, or load the weights alone "
        "into the model before dsx.initialize (python -m deepspeed.utils.zero_to_fp32)"
    )


def _stage_of(engine: Any) -> str:
    if engine.zero_optimization_stage() == 3:
        return "3"
    return "1 or 2" if hasattr(engine.optimizer, "dp_process_group") else "0"


def begin_from(engine: Any, handle: Handle, plain: Plain, takes_schedule: bool) -> None:
    """Begin outer training from what DeepSpeed has loaded. Collective over all clusters.

    ValueError, in all clusters, if they have loaded different checkpoints.
    """
    begin_alike(handle, loaded_of(engine), str(plain.directory))
    position = _go_on_with_data(engine, handle, plain)
    _tell(engine, plain, takes_schedule, position)


def loaded_of(engine: Any) -> list[Any]:
    """Return counters, schedule, and a digest of the optimizer's states. Collective."""
    optimizer = stepping_optimizer(engine)
    pieces = locate(engine).pieces(trained_parameters(engine))
    states = (
        (name, piece, optimizer.state.get(piece.master, {})) for name, piece in pieces.items()
    )
    digest = digest_states(optimizer.param_groups, states)
    schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else {}
    counters = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    return [*counters, repr(plain_values(schedule)), digest]


def _go_on_with_data(engine: Any, handle: Handle, plain: Plain) -> str:
    """Let `training_data` go on behind what that run has read; say where. Collective."""
    loader = loader_of(engine)
    said = ""
    if loader is None and (count := plain.facts["global_samples"]):
        said = (
            f"that run had read {count:,} samples: the script's own loader begins where the "
            "script lets it begin, in every cluster"
        )
    if loader is not None:
        shard = loader.dataset
        if shard.num_clusters != handle.num_clusters:
            said = "training_data, which is this cluster's own, begins at its first sample"
        else:
            total = len(shard.dataset)
            epoch, read = samples_read(total, engine, plain.facts)
            is_left = (total - read) // shard.num_clusters > 0
            loader.go_to(0, read if is_left and read else None)
            left = (total - read) // shard.num_clusters if is_left else 0
            said = (
                f"training_data goes on after {read:,} of {total:,} samples of epoch {epoch}, of "
                f"whose rest each cluster reads {left:,}"
            )
    return next((told for told in gather_objects(said) if told), "")


def samples_read(total: int, engine: Any, facts: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epochs that a plain run has read whole, and the samples of the one it was in.

    By its ranks and how many micro-batches each has read, as DeepSpeed's loader deals `total`
    samples over all ranks, each of which reads the last batch of an epoch as large as it is.
    DeepSpeed counts all micro-batches as whole ones, so their number is exact where that of those
    in a step has changed. ValueError where their size has.
    """
    ranks = facts["dp_world_size"] // engine.sequence_parallel_size  # peers read the same
    steps = facts["global_steps"]
    if not steps:
        return 0, 0
    per_rank = (facts["global_samples"] or steps * engine.train_batch_size()) // ranks
    micro = facts["config"]["train_micro_batch_size_per_gpu"]
    if not isinstance(micro, int) or per_rank % micro:
        micro = engine.train_micro_batch_size_per_gpu()
    if per_rank % micro:
        raise ValueError(
            f"that run has read {per_rank:,} samples on each of {ranks} rank(s), which is no whole "
            f"number of micro-batches of {micro}: their size has changed, and where it was in "
            "training_data cannot be told; set train_micro_batch_size_per_gpu to what it was, or "
            "give dsx.initialize a training_data of what is left"
        )
    own = -(-total // ranks)
    batches = own // micro if engine.dataloader_drop_last() else -(-own // micro)
    epoch, in_epoch = divmod(per_rank // micro, max(batches, 1))
    return epoch, min(in_epoch * micro * ranks, total)


def _tell(engine: Any, plain: Plain, takes_schedule: bool, position: str) -> None:
    facts = plain.facts
    schedule = " (it has no learning rate schedule)"
    if facts["has_schedule"]:
        is_taken = takes_schedule and engine.lr_scheduler is not None
        schedule = ", learning rate schedule" if is_taken else " (not its learning rate schedule)"
    layout = "its universal checkpoint" if plain.is_universal else f"ZeRO-{plain.stage}"
    if torch.distributed.get_rank() == 0:
        logger.warning(
            "begins from %s, of plain DeepSpeed %s (%s, %s data-parallel rank(s), step %s): "
            "weights, optimizer states%s and counters are taken in every cluster, "
            "engine.global_steps is %d; outer training begins anew, engine.dsx.step is 0%s",
            plain.directory, facts["ds_version"], layout, facts["dp_world_size"],
            facts["global_steps"], schedule, engine.global_steps,
            f"; {position}" if position else "",
        )  # fmt: skip
