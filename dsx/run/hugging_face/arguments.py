"""`TrainingArguments` and accelerate's DeepSpeed config: the "dsx" block is met and taken out.

`TrainingArguments` initialises torch.distributed as it is made, so the clusters meet right before.
Accelerate walks through a DeepSpeed config and stops at any "auto" that it does not know, of which
a "dsx" block has some. Each cluster gets a folder of its own for what its rank 0 writes.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dsx.checkpoint.tags import cluster_directory
from dsx.comm.world import World, current_world
from dsx.config.files import read_json
from dsx.run.replace import original_of
from dsx.run.session import Session


def replace_arguments(session: Session, training_args: ModuleType) -> None:
    """Join before `TrainingArguments` looks where it is."""
    cls: Any = training_args.TrainingArguments
    original = original_of(cls, "__post_init__")

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        session.has_arguments = True
        document, place, file = _document(self.deepspeed)
        world = session.show(document, place, file)
        if world is not None:
            _take_own_folder(self, world)
        original(self)

    cls.__post_init__ = __post_init__


def replace_deepspeed_config(session: Session, deepspeed_utils: ModuleType) -> None:
    """Take the block out of accelerate's copy of a DeepSpeed config."""
    cls: Any = deepspeed_utils.HfDeepSpeedConfig
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, config_file_or_dict: Any) -> None:
        original(self, config_file_or_dict)
        session.show(self.config, "a DeepSpeed config of accelerate's")
        self.config.pop("dsx", None)

    cls.__init__ = __init__


def replace_backend(state: ModuleType) -> None:
    """Let accelerate see a cluster's ranks on CPUs, too, where it starts no DeepSpeed itself."""
    cls: Any = state.PartialState
    original = original_of(cls, "_prepare_backend")

    @functools.wraps(original)
    def _prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        is_told = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        world = current_world()
        if found[0] is None and world is not None and (is_told or world.world_size > 1):
            return "gloo", state.DistributedType.MULTI_CPU
        return found

    cls._prepare_backend = _prepare_backend


def _document(source: Any) -> tuple[Any, str, str]:
    """Return a DeepSpeed config as it is written, where that is, and its file, if it is one."""
    if isinstance(source, Mapping):
        return cast("Mapping[str, Any]", source), "TrainingArguments(deepspeed=...)", ""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return json.loads(source), "TrainingArguments(deepspeed=...)", ""
    if isinstance(source, str) and Path(source).is_file():
        return read_json(source), source, source
    return None, "", ""


def _take_own_folder(arguments: Any, world: World) -> None:
    """Give this cluster its place below `output_dir`; once, as arguments are copied."""
    base = Path(os.path.expanduser(arguments.output_dir or "trainer_output"))
    own = cluster_directory(base, world.cluster_id)
    if base.name != own.name:
        arguments.output_dir = str(own)
        if arguments.push_to_hub and arguments.hub_model_id is None:
            arguments.hub_model_id = base.absolute().name  # the Trainer's, of the folder
    suffix = f"-{own.name}"
    if arguments.run_name and not arguments.run_name.endswith(suffix):
        arguments.run_name += suffix
    if world.cluster_id:
        arguments.push_to_hub = False  # all have the same model, and cluster 0 pushes it
