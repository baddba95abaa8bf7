"""Which modules are waited for, and what is replaced in each once a script has imported it."""

from __future__ import annotations

from dsx.run.deepspeed import replace_initialize
from dsx.run.imports import Follow
from dsx.run.not_served import refuse_accelerate, refuse_lightning
from dsx.run.session import Session


def follow_frameworks(session: Session) -> dict[str, Follow]:
    """Return what is done once each of these modules is there."""
    return {
        "deepspeed": lambda module: replace_initialize(session, module),
        "accelerate.accelerator": refuse_accelerate,
        "lightning.pytorch.strategies.deepspeed": refuse_lightning,
        "pytorch_lightning.strategies.deepspeed": refuse_lightning,
    }
