"""`engine.save_checkpoint` and `engine.load_checkpoint`, extended by the outer state.

Each cluster has its own directory, `<save_dir>/cluster_<m>/<tag>/`: every cluster has a rank 0,
and they must not overwrite each other's files. The outer state is written beside DeepSpeed's
files before `latest` names the tag. Without a tag, loading takes the newest one that all
clusters hold complete, so a cluster that died while saving does not split the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsx.checkpoint import COMPLETE_MARK, common_tag, complete_tags, mark_complete
from dsx.comm.world import World
from dsx.handle import Handle


def carry_outer_state(engine: Any, handle: Handle, world: World) -> None:
    """Replace the engine's two checkpoint methods by ones that carry the outer state, too."""
    save_checkpoint, load_checkpoint = engine.save_checkpoint, engine.load_checkpoint

    def save(
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as DeepSpeed does, into this cluster's directory, with the outer state."""
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        cluster_dir = cluster_directory(save_dir, world)
        directory = cluster_dir / tag
        if world.rank == 0:
            (directory / COMPLETE_MARK).unlink(missing_ok=True)
        result = save_checkpoint(
            str(cluster_dir), tag, client_state or {}, False, exclude_frozen_parameters
        )
        handle.save(directory)
        dist.barrier()
        if world.rank == 0:
            mark_complete(directory, handle.step, world.session)
            if save_latest:
                (cluster_dir / "latest").write_text(tag)
        dist.barrier()
        handle.saved(directory)
        return result

    def load(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load as DeepSpeed does, from this cluster's directory, with the outer state."""
        if load_module_only or not load_optimizer_states:
            raise ValueError(
                "load_checkpoint without optimizer states leaves the masters and the anchor apart; "
                "load the weights into the model before dsx.initialize instead"
            )
        cluster_dir = cluster_directory(load_dir, world)
        tags = handle.gather(complete_tags(cluster_dir))
        tag = common_tag(tags, Path(load_dir), str(tag) if tag is not None else None)
        result = load_checkpoint(
            str(cluster_dir), tag, load_module_strict, True, load_lr_scheduler_states, False,
            custom_load_fn,
        )  # fmt: skip
        handle.load(cluster_dir / tag)
        handle.saved(cluster_dir / tag)
        return result

    engine.save_checkpoint, engine.load_checkpoint = save, load


def cluster_directory(base: str | Path, world: World) -> Path:
    """Return the directory of this cluster's checkpoints."""
    return Path(base) / f"cluster_{world.cluster_id}"
