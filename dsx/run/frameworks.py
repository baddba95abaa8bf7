"""Which modules are waited for, and what is replaced in each once a script has imported it."""

from __future__ import annotations

import sys
from types import ModuleType

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
from dsx.run.not_served import refuse_accelerate
from dsx.run.process_group import keep_world
from dsx.run.session import Session


def follow_frameworks(session: Session) -> dict[str, Follow]:
    """Return what is done once each of these modules is there."""

    def distributed(module: ModuleType) -> None:
        keep_world(session, module)
        finish_before_destroy(session, module)

    def trainer(module: ModuleType) -> None:
        replace_trainer(session, module, sys.modules["transformers.trainer_callback"])

    def lightning(root: str) -> Follow:
        return lambda module: replace_lightning(session, root)

    return {
        "torch.distributed": distributed,
        "deepspeed": lambda module: replace_initialize(session, module),
        "accelerate.state": replace_backend,
        "accelerate.accelerator": lambda module: refuse_accelerate(session, module),
        "accelerate.utils.deepspeed": lambda module: replace_deepspeed_config(session, module),
        "transformers.training_args": lambda module: replace_arguments(session, module),
        "transformers.trainer": trainer,
        "lightning.pytorch.trainer.trainer": lightning("lightning.pytorch"),
        "pytorch_lightning.trainer.trainer": lightning("pytorch_lightning"),
    }
