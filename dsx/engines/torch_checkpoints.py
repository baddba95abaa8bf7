"""Checkpoints of plain PyTorch: model, optimizers and outer state, as one tag of each cluster.

`<directory>/cluster_<m>/<tag>/` holds what a tag of DeepSpeed's does, and in `torch/` the model and
the optimizers by `torch.distributed.checkpoint`: shards of FSDP2 as they lie, what all ranks hold
alike once. With `checkpoints.beside_training` all of it is written while training goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from dsx.checkpoint.checksums import OF_TORCH
from dsx.checkpoint.files import SavedCluster
from dsx.checkpoint.health import tensors_of
from dsx.checkpoint.tags import cluster_directory, complete_tag
from dsx.comm.world import current_world
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.engines.agreed_save import AgreedSave, survives
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.distributed_adam import KIND, is_distributed
from dsx.engines.distributed_files import (
    EnginePart,
    load,
    new_host_group_of_all,
    new_stager,
    read_metadata,
)
from dsx.engines.distributed_state import (
    place_for,
    place_for_groups,
    require_same_groups,
    require_served,
    state_of,
    take,
)
from dsx.engines.end_of_script import EndOfScript
from dsx.engines.resume_point import choose
from dsx.engines.torch import TorchAdapter
from dsx.training.handle import Handle
from dsx.training.manifest import manifest_of


class TorchCheckpoints:
    """What `handle` trains, to and from the directories of checkpoints; made right behind `attach`.

    ValueError for a handle of another engine. Every rank of a cluster makes one. With it
    `checkpoints.keep` and `checkpoints.remote`, `divergence.max_rollbacks` and the end by a signal
    need nothing more of the script.
    """

    def __init__(self, handle: Handle) -> None:
        adapter, world = handle.loop.adapter, current_world()
        if not isinstance(adapter, TorchAdapter) or world is None:
            raise ValueError(
                f"TorchCheckpoints({type(adapter).__name__}): they are of what dsx.attach(model, "
                "optimizer, config=...) returns; DeepSpeed and Megatron save their own"
            )
        if is_distributed(adapter.inner_optimizers):
            raise ValueError(
                f"TorchCheckpoints does not save apex's {KIND}, whose state is of buckets: save "
                "its state_dict() and the model's beside handle.save(), and load both before "
                "handle.load()"
            )
        self._handle, self._world, self._adapter = handle, world, adapter
        self._group: Any = None
        self._stager: Any = None
        end: Any = handle.preemption.engine
        if isinstance(end, EndOfScript):
            end.serve(self._write_own)
        handle.rollback.load = self.load
        for optimizer in adapter.inner_optimizers:
            self._look_behind_first_step(optimizer)

    def save(self, directory: str | Path, tag: str | None = None) -> bool:
        """Save in this cluster's part of `directory`, by default as `step<n>`.

        Returns whether it is saved, or begun where `checkpoints.beside_training` is set; what
        cannot be written is told, and training goes on. Every rank of the cluster calls it, and
        behind `finish()` of all clusters, as it then holds the finished model.
        """
        return survives(lambda: self._save(directory, tag))

    def load(self, directory: str | Path, tag: str | None = None) -> Path | None:
        """Load `tag`, or the newest good checkpoint that all clusters hold; return its directory.

        On every rank of all clusters, before the first step. FileNotFoundError where there is none;
        ValueError for what is damaged or of another model. None in a cluster that joins a run: what
        the others hold is newer than any checkpoint.
        """
        handle, world = self._handle, self._world
        handle.beside.wait_together()  # what is being written may be what is to be loaded
        if handle.joining.is_due:
            handle.joining.look_in(directory, tag)
            handle.settle()
            return None
        source, tag = choose(
            handle.gather, world, directory, tag, handle.only_before, remote=handle.remote
        )
        path = cluster_directory(directory, source) / tag
        saved = SavedCluster(path)
        self._load_own(path / OF_TORCH)
        is_new, is_other = source != world.cluster_id, saved.num_clusters != world.num_clusters
        handle.load(path, is_new, is_other)
        return path

    def close(self) -> None:
        """Return once nothing is written any more; give back the memory for copies."""
        has_closed(self)
        self._handle.beside.close()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _look_behind_first_step(self, optimizer: Optimizer) -> None:
        """Let a step raise ValueError, once, where what the optimizer then keeps is not served."""

        def look(*_: Any) -> None:
            hook.remove()
            require_served(self._adapter.model, optimizer)

        hook = optimizer.register_step_post_hook(look)

    def _require_served(self) -> None:
        """Raise ValueError on all ranks where one keeps what is not served. Collective."""
        why = None
        try:
            for optimizer in self._adapter.inner_optimizers:
                require_served(self._adapter.model, optimizer)
        except ValueError as error:
            why = str(error)
        if wrong := next(filter(None, gather_objects(why)), None):
            raise ValueError(f"nothing is saved: {wrong}")

    def _save(self, directory: str | Path, tag: str | None) -> None:
        handle, world = self._handle, self._world
        tag = f"step{handle.step}" if tag is None else tag
        own = cluster_directory(directory, world.cluster_id)
        self._require_served()
        with handle.saving():
            saving = AgreedSave(handle, own, tag, world.rank == 0, may_be_later=True)
            begun = saving.unfinished
            saving.do(lambda: self._write_own(begun))
            saving.do(lambda: handle.write(begun, lambda: self.save(directory, tag)))
            optimizers = self._adapter.inner_optimizers
            judged = gather_objects(handle.rollback.judge(tensors_of(optimizers)))
            manifest = manifest_of(handle, world, judged)
            saving.complete(lambda: complete_tag(own, tag, manifest))

    def _write_own(self, directory: Path) -> None:
        """Write model and optimizers, now or beside training. Collective in the cluster."""
        adapter = self._adapter
        state = state_of(adapter.model, adapter.inner_optimizers)
        group, stager = self._tools()
        self._handle.beside.write(EnginePart(state, directory / OF_TORCH, group, stager))

    def _load_own(self, path: Path) -> None:
        adapter = self._adapter
        if not path.is_dir():
            raise ValueError(
                f"{path.parent} was not saved by TorchCheckpoints: load what the script has saved "
                "there by itself, and handle.load(directory)"
            )
        group, _ = self._tools()
        metadata = read_metadata(path)
        groups = place_for_groups(metadata)
        load(groups, path, group)
        require_same_groups(adapter.model, adapter.inner_optimizers, groups)
        place = place_for(adapter.model, metadata)
        load(place, path, group)
        take(adapter.model, adapter.inner_optimizers, place)

    def _tools(self) -> tuple[Any, Any]:
        """Return the group and the copier, made at first. Collective in the cluster."""
        if self._group is None:
            self._group = new_host_group_of_all(self._world.in_cluster_seconds)
            self._stager = new_stager(next(self._adapter.model.parameters()).device)
            close_at_exit(self)
        return self._group, self._stager
