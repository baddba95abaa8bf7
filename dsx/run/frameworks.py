"""Which modules are waited for, and what is replaced in each once a script has imported it."""

from __future__ import annotations

import sys
from types import ModuleType

from dsx.run.accelerate.loaders import replace_loader
from dsx.run.accelerate.loop import Loop, replace_accelerator
from dsx.run.accelerate.models import replace_models, warn_of_own_weights
from dsx.run.accelerate.refusals import (
    refuse_launchers,
    refuse_local_sgd,
    refuse_search_of_batch_size,
)
from dsx.run.accelerate.states import replace_states
from dsx.run.deepspeed import replace_initialize
from dsx.run.end import finish_before_destroy
from dsx.run.hugging_face.arguments import (
    replace_arguments,
    replace_backend,
    replace_deepspeed_config,
)
from dsx.run.hugging_face.trainer import replace_trainer
from dsx.run.imports import Follow
from dsx.run.lightning.trainer import replace_lightning
from dsx.run.process_group import keep_world
from dsx.run.session import Session
from dsx.run.versions import tell_of_version


def follow_frameworks(session: Session) -> dict[str, Follow]:
    """Return what is done once each of these modules is there."""
    loops: list[Loop] = []  # one, once Accelerate is there

    def accelerator(module: ModuleType) -> None:
        replace_loader(session)
        loop = replace_accelerator(session, module)
        replace_states(loop, module.Accelerator)
        replace_models(loop, module.Accelerator)
        loops.append(loop)

    def transformers_models(module: ModuleType) -> None:
        warn_of_own_weights(lambda: loops[0].trained if loops else [], module)

    def distributed(module: ModuleType) -> None:
        keep_world(session, module)
        finish_before_destroy(session, module)

    def trainer(module: ModuleType) -> None:
        replace_trainer(session, module, sys.modules["transformers.trainer_callback"])

    def lightning(root: str) -> Follow:
        return lambda module: replace_lightning(session, root)

    replaced: dict[str, Follow] = {
        "torch.distributed": distributed,
        "deepspeed": lambda module: replace_initialize(session, module),
        "accelerate.state": replace_backend,
        "accelerate.accelerator": accelerator,
        "accelerate.launchers": refuse_launchers,
        "accelerate.local_sgd": refuse_local_sgd,
        "accelerate.utils.memory": refuse_search_of_batch_size,
        "accelerate.utils.deepspeed": lambda module: replace_deepspeed_config(session, module),
        "transformers.modeling_utils": transformers_models,
        "transformers.training_args": lambda module: replace_arguments(session, module),
        "transformers.trainer": trainer,
        "lightning.pytorch.trainer.trainer": lightning("lightning.pytorch"),
        "pytorch_lightning.trainer.trainer": lightning("pytorch_lightning"),
    }
    return {"trl": _tell, **{name: _telling(act) for name, act in replaced.items()}}


def _tell(module: ModuleType) -> None:
    tell_of_version(module.__name__.partition(".")[0])


def _telling(act: Follow) -> Follow:
    def follow(module: ModuleType) -> None:
        _tell(module)
        act(module)

    return follow
