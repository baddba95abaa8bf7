"""Runs whose checkpoints were made by commit 2317291 and are kept in tests/fixtures.

Every preset in plain PyTorch over gloo, on a model small enough for all of it to fit into some 250
kB, and one DeepSpeed engine; two clusters of one rank, SGD without moments, stopped at step 13 with
whatever is under way then. `fixtures.py` has made the files with these functions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .models import LAST_STEP, PRESETS, Net, batch, block

NUM_CLUSTERS = 2
DEEPSPEED, TAG = "deepspeed", "midway"
_SMALL = (6, 6, 6, 6, 6)
_SIDES = {"dilocox": (32, 33, 32)}  # matrices that its codec takes
Weights = dict[str, Tensor]
_world: Any = None  # of this process


class Plain:
    """One cluster's model of a row, with dsx attached; loaded from a directory of all clusters."""

    def __init__(self, name: str, saved: Path | None = None) -> None:
        import dsx

        config = block(PRESETS[name], NUM_CLUSTERS, metrics=None)
        self.cluster = join(config).cluster_id
        self._sides = _SIDES.get(name, _SMALL)
        self.model = Net(self.cluster, self._sides)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.handle = dsx.attach(self.model, self.optimizer, config=config)
        if saved is not None:
            own = saved / f"cluster_{self.cluster}"
            self.model.load_state_dict(load_file(own / "weights.safetensors"))
            self.handle.load(own)

    def train(self, first: int, last: int) -> Weights:
        """Take the steps and return the weights after the last one."""
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(*batch(self.cluster, step, sides=self._sides)).backward()
            self.optimizer.step()
        return copies(self.model)

    def save(self, directory: Path) -> None:
        own = directory / f"cluster_{self.cluster}"
        self.handle.save(own)
        save_file(copies(self.model), own / "weights.safetensors")


class Engine:
    """One cluster's DeepSpeed engine (ZeRO-1), loaded from a directory of all clusters."""

    def __init__(self, saved: Path | None = None) -> None:
        import deepspeed  # noqa: F401 - which then takes the cluster's world

        import dsx

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **block(PRESETS["streaming_diloco"], NUM_CLUSTERS, metrics=None),
        }
        self.cluster = join(config).cluster_id
        model = Net(self.cluster, _SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        self.engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
        self.handle = self.engine.dsx
        if saved is not None:
            path, _ = self.engine.load_checkpoint(str(saved), tag=TAG)
            assert path is not None

    def train(self, first: int, last: int) -> Weights:
        for step in range(first, last + 1):
            self.engine.backward(self.engine(*batch(self.cluster, step, sides=_SMALL)))
            self.engine.step()
        return copies(self.engine.module)

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag=TAG)


def start(name: str, saved: Path | None = None) -> Plain | Engine:
    return Engine(saved) if name == DEEPSPEED else Plain(name, saved)


def stop_of(name: str) -> int:
    return PRESETS["streaming_diloco" if name == DEEPSPEED else name].stop


def go_on(fixtures: str, name: str, again: str) -> dict[str, Weights]:
    """Return weights at the end: gone on from the fixture, also by way of a save, and whole."""
    first, stop = Path(fixtures) / name, stop_of(name)
    ends: dict[str, Weights] = {}
    for what, saved in (("fixture", first), ("saved again", Path(again) / name), ("whole", None)):
        trainer = start(name, saved)
        assert trainer.handle.step == (0 if saved is None else stop)
        if what == "fixture":
            trainer.save(Path(again) / name)
        ends[what] = trainer.train(1 if saved is None else stop + 1, LAST_STEP)
        trainer.handle.close()
    return ends


def go_on_all(fixtures: str, names: list[str], again: str) -> dict[str, dict[str, Any]]:
    """Of this cluster, as NumPy arrays, which travel between processes without a file."""
    return {
        name: {
            what: {n: w.numpy() for n, w in weights.items()}
            for what, weights in go_on(fixtures, name, again).items()
        }
        for name in names
    }


def copies(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def join(config: dict[str, Any]) -> Any:
    """Join once in a process; `init_distributed` makes the world that all rows share."""
    global _world
    if _world is None:
        import dsx

        _world = dsx.init_distributed(config)
    return _world


def machine() -> dict[str, str]:
    """Return what the last bits of a matrix product depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": model, "instructions": capability}
