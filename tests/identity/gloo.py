"""Every method over gloo, two clusters of one rank, in plain PyTorch: `dsx.attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import stopped
from .evidence import Run, weights_of
from .models import ROWS, Net, adamw, batch, block

_world: Any = None  # of this process


def record(workspace: str) -> dict[str, Run]:
    return stopped.record(workspace, ROWS, stopped.NUM_CLUSTERS, Plain)


class Plain:
    """A module and its optimizer, one rank a cluster."""

    def __init__(self, name: str, metrics: str, saved: Path | None) -> None:
        global _world
        import dsx

        config = block(ROWS[name], stopped.NUM_CLUSTERS, metrics)
        _world = _world or dsx.init_distributed(config)
        self.cluster = _world.cluster_id
        self.model = Net(seed=self.cluster)  # only cluster 0's start counts
        self.optimizer = adamw(self.model)
        self.handle = dsx.attach(self.model, self.optimizer, config=config)
        if saved is not None:
            held = torch.load(self._directory(saved) / "engine.pt")
            self.model.load_state_dict(held["model"])
            self.optimizer.load_state_dict(held["optimizer"])
            self.handle.load(self._directory(saved))

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = self.model(*batch(self.cluster, step))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def weights(self) -> str:
        return weights_of(self.model)

    def save(self, directory: Path) -> None:
        own = self._directory(directory)
        own.mkdir(parents=True)
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(held, own / "engine.pt")
        self.handle.save(own)

    def close(self) -> None:
        self.handle.close()

    def _directory(self, base: Path) -> Path:
        return base / f"cluster_{self.cluster}"
