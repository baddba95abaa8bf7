"""A Trainer's run that begins from a checkpoint of a Trainer without dsx, and goes on behind it.

Weights, optimizer states, schedule and step are taken in every cluster as the Trainer loads them,
from DeepSpeed's files (engines/deepspeed/synchronous.py) or from its own (engines/deepspeed/
torch_states.py). The place in the data: sequel.py. Steps go on, so `max_steps` counts from the
first step of that run; epochs of one world are others than those of a cluster.
"""

from __future__ import annotations

import json
import logging
import math
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from dsx.config.files import ConfigError
from dsx.run.hugging_face.sequel import (
    Begun,
    Part,
    SequelSampler,
    begun_of_plain,
    in_order,
    seeded_order,
)

STATE, OPTIMIZER, SCHEDULE = "trainer_state.json", "optimizer.pt", "scheduler.pt"
_FIX = (
    "set TrainingArguments(ignore_data_skip=True) (--ignore_data_skip True), and each cluster "
    "begins its data anew"
)
logger = logging.getLogger(__name__)


def is_plain(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a Trainer without dsx, with its optimizer's states."""
    has_states = any(folder.glob("global_step*")) or (folder / OPTIMIZER).is_file()
    return (folder / STATE).is_file() and has_states and not any(folder.glob("cluster_*"))


def holds_torch_states(folder: Path) -> bool:
    """Whether such a checkpoint was saved without DeepSpeed."""
    return not any(folder.glob("global_step*"))


def identity(folder: Path) -> list[Any]:
    """Return what is equal in all copies of a checkpoint: its name, and digests of small files."""
    files = [file for file in (folder / STATE, folder / SCHEDULE) if file.is_file()]
    return [folder.name, *(blake2b(file.read_bytes(), digest_size=8).hexdigest() for file in files)]


def require_whole_model(trainer: Any, folder: Path) -> None:
    """Raise ConfigError where weights that were saved without DeepSpeed have no whole model."""
    if trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        raise ConfigError(
            f"{folder} was saved without DeepSpeed, and ZeRO stage 3 has the model in parts before "
            "its weights can be loaded: use stage 0, 1 or 2, or begin from the weights alone "
            "(--model_name_or_path)"
        )


def begun_at(trainer: Any, folder: Path) -> Begun:
    """Return where the run was that has saved a plain checkpoint; ValueError if it does not say."""
    state = json.loads((folder / STATE).read_text())
    if not hasattr(trainer.train_dataset, "__len__") or trainer.args.ignore_data_skip:
        return Begun(state["global_step"], int(state["epoch"]), 0)
    total, drops = len(trainer.train_dataset), trainer.args.dataloader_drop_last
    return begun_of_plain(state, _num_ranks(folder), total, drops)


def _num_ranks(folder: Path) -> int:
    """Return how many ranks have saved a checkpoint, each of which leaves its random state."""
    names = {file.name for file in folder.glob("rng_state*.pth")}
    of_ranks = {f"rng_state_{rank}.pth" for rank in range(len(names))}
    if not names:
        raise ValueError(
            f"{folder} holds no rng_state*.pth, by which the number of its run's ranks is known, "
            f"and so its place in the data; {_FIX}"
        )
    if names not in ({"rng_state.pth"}, of_ranks):
        raise ValueError(
            f"{folder} holds {sorted(names)}, which are not those of all ranks, by whose number "
            f"its run's place in the data is known: copy the files of all nodes into it; or {_FIX}"
        )
    return len(names)


def follow(trainer: Any, base: type, begun: Begun, part: Part) -> None:
    """Let the Trainer read what comes behind; `base` is transformers' own class.

    ConfigError, with what to do, where samples come in another order than that of its sampler.
    """
    _require_max_steps(trainer, begun, part)
    if trainer.args.ignore_data_skip:
        return
    sampler = _make_sampler(trainer, base, begun, part)
    make_loader = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        loader = make_loader()
        batches, together = len(loader), trainer.args.gradient_accumulation_steps
        sampler.steps_per_epoch = max(math.ceil(batches / together), 1)
        return loader

    trainer._get_train_sampler = lambda _=None: sampler  # pyright: ignore[reportUnknownLambdaType]
    trainer.get_train_dataloader = get_train_dataloader
    if torch.distributed.get_rank() == 0:
        logger.warning(
            "dsx: cluster %d goes on behind step %d: it reads %s samples of what that run had left "
            "of epoch %d, and then %s of %s samples an epoch", part.cluster_id, begun.step,
            f"{len(sampler.rest):,}", begun.epoch, f"{len(part):,}", f"{part.num_samples:,}",
        )  # fmt: skip


def refuse_stream(trainer: Any) -> None:
    """Raise ConfigError for a stream, in which nobody knows a place, unless none is asked for."""
    if not trainer.args.ignore_data_skip:
        raise ConfigError(
            "the training data is a stream, of which a cluster's place behind a run without dsx is "
            f"not known: {_FIX}"
        )


def _require_max_steps(trainer: Any, begun: Begun, part: Part) -> None:
    arguments = trainer.args
    if arguments.max_steps > 0:
        return
    left = arguments.num_train_epochs * part.num_samples
    left -= begun.epoch * part.num_samples + begun.read
    steps = begun.step + max(math.ceil(left / part.num_clusters / _samples_per_step(arguments)), 0)
    raise ConfigError(
        f"num_train_epochs={arguments.num_train_epochs:g} counts epochs of one world, and the "
        "steps of clusters are others: set TrainingArguments(max_steps=...), counted from the "
        f"first step of the run without dsx; max_steps={steps} reads as many samples"
    )


def _samples_per_step(arguments: Any) -> int:
    """Return what a cluster reads in a step, as its Trainer counts."""
    ranks, together = arguments.world_size, arguments.gradient_accumulation_steps
    return arguments.train_batch_size * ranks * together


def _make_sampler(trainer: Any, base: Any, begun: Begun, part: Part) -> SequelSampler:
    kind = type(trainer)
    for name in ("_get_train_sampler", "get_train_dataloader"):
        if getattr(kind, name) is not getattr(base, name):
            raise ConfigError(
                f"{kind.__name__}.{name} orders the data itself, so the place of the run without "
                f"dsx in it is not known: {_FIX}"
            )
    settings = trainer.args.accelerator_config
    own = trainer._get_train_sampler()
    if type(own) is RandomSampler and settings.use_seedable_sampler:
        seed = trainer.args.data_seed
        order = seeded_order(torch.random.initial_seed() if seed is None else seed)
    elif type(own) is SequentialSampler:
        order = in_order
    else:
        raise ConfigError(
            f"the training data is ordered by {type(own).__name__}, use_seedable_sampler="
            f"{settings.use_seedable_sampler}: the order of the run without dsx is not known; "
            f"{_FIX}"
        )
    if settings.split_batches:
        raise ConfigError(f"split_batches=True counts batches otherwise: leave it out, or {_FIX}")
    return SequelSampler(
        part, begun, order, _samples_per_step(trainer.args), lambda: trainer.state.global_step
    )
