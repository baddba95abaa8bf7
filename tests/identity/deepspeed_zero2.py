"""DeepSpeed ZeRO-2, two clusters of two ranks, AdamW, two micro-batches: `dsx.initialize`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from . import stopped
from .evidence import Run, weights_of
from .models import ROWS, Net, batch, block

RANKS_PER_CLUSTER, MICRO_BATCHES = 2, 2
PRECISIONS = {
    "streaming_diloco": "fp32",
    "dilocox": "fp32",
    "eager": "bf16",
    "cocodc, top-k": "fp32",
    "co2, element, nesterov, clip": "bf16",
}


def record(workspace: str) -> dict[str, Run]:
    rows = {name: ROWS[name] for name in PRECISIONS}
    return stopped.record(workspace, rows, stopped.NUM_CLUSTERS * RANKS_PER_CLUSTER, Zero2)


class Zero2:
    """An engine that `dsx.initialize` makes."""

    def __init__(self, name: str, metrics: str, saved: Path | None) -> None:
        import deepspeed  # noqa: F401 - which then takes the cluster's world

        import dsx

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 2},
            "steps_per_print": 10**9,
            **block(ROWS[name], stopped.NUM_CLUSTERS, metrics),
        }
        if PRECISIONS[name] == "bf16":
            config["bf16"] = {"enabled": True}
        if not torch.distributed.is_initialized():
            dsx.init_distributed(config)
        model = Net(seed=0 if saved is None else 5)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.005},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
        self.handle = self.engine.dsx
        if saved is not None:
            path, _ = self.engine.load_checkpoint(str(saved), tag="midway")
            if path is None:
                raise RuntimeError(f"DeepSpeed has loaded nothing from {saved}")

    def step(self, step: int) -> float:
        losses: list[float] = []
        for micro in range(MICRO_BATCHES):
            part = self.engine.global_rank * MICRO_BATCHES + micro
            x, y = batch(self.handle.cluster_id, step, part)
            loss = self.engine(x.to(next(self.engine.module.parameters()).dtype), y)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return sum(losses) / MICRO_BATCHES

    def weights(self) -> str:
        return weights_of(self.engine.module)

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag="midway")

    def close(self) -> None:
        self.handle.close()
        self.engine.destroy()
