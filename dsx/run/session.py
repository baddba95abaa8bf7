"""One rank of a script under `dsx.run`: its block, its world, and the engines that train in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import dsx
from dsx.comm.world import World, current_world
from dsx.config.schema import DsxConfig, load_config
from dsx.engines.joined import refuse_joining
from dsx.run.block import RunBlock
from dsx.training.finish import keep_exported

ROUTES = (
    "deepspeed.initialize with an optimizer; the Hugging Face Trainer, and TRL's trainers, with "
    "TrainingArguments(deepspeed=FILE); a loop over Accelerate, with DeepSpeed, DDP or FSDP2; "
    "Lightning's Trainer with DDP, FSDP2 or DeepSpeed; a loop in plain PyTorch over one model, "
    "alone or with DistributedDataParallel or fully_shard. A script that trains in another way "
    "calls dsx.attach(model, optimizer, config=...) itself"
)


class RouteNotTaken(RuntimeError):
    """A script has trained, or has ended, and no engine of it exchanges anything."""


class Session:
    """What the replaced functions of all frameworks share in one process."""

    def __init__(self, block: RunBlock) -> None:
        self.block = block
        self.handles: list[Any] = []  # of what dsx.run has attached
        self.ended: list[Any] = []  # of them: whose framework has ended its training
        self.seen: list[str] = []  # what has gone by without a block, or without an optimizer
        self.keeping_average: list[Any] = []  # of them: whose model holds the average at the end
        self.has_trained = False  # whether an optimizer has stepped with an engine attached
        self.has_met_script = False  # whether the script has asked for the world that is there
        self.divides_data = False  # whether dsx.run sees to the data, and not dsx.initialize
        self.trainers: list[Any] = []  # of Hugging Face, that have begun to train
        self.has_own_data = False  # whether the clusters were seen to have data of their own
        self.has_arguments = False  # whether TrainingArguments were made: a Trainer's script
        self.has_accelerator = False  # whether the script has made one
        self.models: list[Any] = []  # that a loop of the script's own trains
        self._whose_data: str | None = None

    def join(self) -> World | None:
        """Return this process's world, made now if the block is known and nobody has.

        Collective over all ranks of all clusters where it makes the world.
        """
        world = current_world()
        if world is None and self.block.is_known:
            _require_launcher()
            world = dsx.init_distributed(self.block.resolve())
            refuse_joining(world, "dsx.run yet, whose frameworks count steps themselves")
        return world

    def show(self, document: Any, place: str, file: str = "") -> World | None:
        """Take the block of a config that a script gives to somebody; return the world, if any."""
        self.block.show(document, place, file)
        return self.join()

    def config_with_block(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a DeepSpeed config that has this run's block.

        Without `clusters.data` where that has been seen to: dsx.initialize gets no data then.
        """
        block = self.block.resolve()["dsx"]
        if self.divides_data and isinstance(block.get("clusters"), dict):
            clusters = {key: v for key, v in block["clusters"].items() if key != "data"}
            block = {**block, "clusters": clusters}
        return {**document, "dsx": block}

    @property
    def settings(self) -> DsxConfig:
        """What the block says, read anew; once it is known."""
        return load_config(self.block.resolve())

    @property
    def whose_data(self) -> str:
        """`clusters.data` of this run: "auto", "split" or "own"; "own" once that has been seen."""
        if self._whose_data is None:
            self._whose_data = self.settings.clusters.data
        return "own" if self.has_own_data else self._whose_data

    @property
    def has_engine(self) -> bool:
        """Whether an engine is attached, by dsx.run or by the script."""
        world = current_world()
        return world is not None and world.num_handles > 0

    def require_engine(self, what: str) -> None:
        """Raise RouteNotTaken, which names the routes that work, if nothing is attached."""
        if self.has_engine:
            return
        if not self.block.is_known:
            why = (
                'no "dsx" block was found: give --dsx-config FILE, or set DSX_CONFIG, or put it '
                "into the DeepSpeed JSON that the script reads"
            )
        else:
            why = f"take one of the routes that dsx.run knows: {ROUTES}"
        seen = f" (seen: {'; '.join(self.seen)})" if self.seen else ""
        raise RouteNotTaken(
            f"{what}, and no engine is attached: the clusters would train models of their own"
            f"{seen}. {why[0].upper()}{why[1:]}"
        )

    def finish(self) -> None:
        """End what the script has trained since the last call. Collective over all clusters."""
        handles, self.handles = self.handles, []
        for handle in handles:
            if handle not in self.ended and not handle.is_finished:
                handle.finish()
                if handle in self.keeping_average:
                    keep_exported(handle.loop)
            handle.close()


def _require_launcher() -> None:
    if "RANK" not in os.environ:
        raise RuntimeError(
            "no launcher has started this process (RANK is not set): start it with `deepspeed "
            "--num_gpus N --module dsx.run SCRIPT`, `torchrun --nproc-per-node N -m dsx.run "
            "SCRIPT`, `accelerate launch -m dsx.run SCRIPT`, `srun python -m dsx.run SCRIPT` or "
            "`mpirun -n N python -m dsx.run SCRIPT`"
        )
