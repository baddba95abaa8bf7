"""A Trainer's files where dsx comes and goes: its optimizer's into DeepSpeed, and a way back.

Without DeepSpeed the Trainer saves `model.safetensors` and torch's own `optimizer.pt`; with it
DeepSpeed's files in `global_step<n>`. Those of a cluster lie in `cluster_<m>` below; a link leads
there from where a Trainer without dsx looks for them.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.tags import cluster_directory, write_durably
from dsx.run.hugging_face.synchronous import OPTIMIZER, STATE

_LATEST = "latest"
logger = logging.getLogger(__name__)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return copies, on the host, of what is trained of a model, before DeepSpeed rounds it."""
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return {name: p.detach().to("cpu", copy=True) for name, p in trained}


def begin_from_trainer(engine: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """Begin from what a Trainer has saved without DeepSpeed. Collective over all clusters.

    The Trainer itself has loaded the weights into the model, and loads its schedule behind this.
    """
    from dsx.engines.deepspeed.torch_states import begin_from_torch

    saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
    step = json.loads((folder / STATE).read_text())["global_step"]
    begin_from_torch(engine, engine.dsx, weights, saved, step, folder)
    if torch.distributed.get_rank() == 0:
        logger.warning(
            "begins from %s, of a Trainer without DeepSpeed (step %d): weights, optimizer states, "
            "schedule and step are taken in every cluster; outer training begins anew, "
            "engine.dsx.step is 0", folder, step,
        )  # fmt: skip


def show_to_plain(folder: Path, cluster_id: int) -> None:
    """Let a Trainer without dsx find this cluster's files of DeepSpeed in its checkpoint.

    Where links cannot be made a warning says what to do.
    """
    own = cluster_directory(folder, cluster_id)
    if not (own / _LATEST).is_file():
        return
    tag = (own / _LATEST).read_text().strip()
    link = folder / tag
    try:
        if not link.is_symlink():
            os.symlink(Path(own.name) / tag, link, target_is_directory=True)
    except OSError as error:
        logger.warning(
            "no link can be made in %s (%s): a Trainer without dsx finds DeepSpeed's files there "
            "once %s is copied into it", folder, error, own / tag,
        )  # fmt: skip
    write_durably(folder / _LATEST, tag)
