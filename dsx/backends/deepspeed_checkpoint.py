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

from dsx.backends.deepspeed import DeepSpeedBackend
from dsx.checkpoint import COMPLETE_MARK, complete_tags, mark_complete, newest_common_tag
from dsx.comm.world import World
from dsx.handle import Handle


def carry_outer_state(engine: Any, backend: DeepSpeedBackend, handle: Handle, world: World) -> None:
    """Replace the engine's two checkpoint methods by ones that carry the outer state, too."""
    save_checkpoint, load_checkpoint = engine.save_checkpoint, engine.load_checkpoint

    def save(save_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as DeepSpeed does, into this cluster's directory, with the outer state."""
        tag = tag if tag is not None else f"global_step{engine.global_steps}"
        cluster_dir = cluster_directory(save_dir, world)
        directory = cluster_dir / tag
        if world.rank == 0:
            (directory / COMPLETE_MARK).unlink(missing_ok=True)
        names_latest = kwargs.pop("save_latest", True)
        result = save_checkpoint(str(cluster_dir), tag, *args, save_latest=False, **kwargs)
        handle.save(directory)
        dist.barrier()
        if world.rank == 0:
            mark_complete(directory, handle.step, world.world_size)
            if names_latest:
                (cluster_dir / "latest").write_text(tag)
        dist.barrier()
        handle.saved(directory)
        return result

    def load(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does, from this cluster's directory, with the outer state."""
        _refuse_partial_load(kwargs)
        cluster_dir = cluster_directory(load_dir, world)
        if tag is None:
            tag = newest_common_tag(handle.gather(complete_tags(cluster_dir)), Path(load_dir))
        elif not (cluster_dir / tag / COMPLETE_MARK).exists():
            held = sorted(complete_tags(cluster_dir))
            raise FileNotFoundError(
                f"no complete checkpoint {tag!r} in {cluster_dir}; held: {held}"
            )
        result = load_checkpoint(str(cluster_dir), tag, *args, **kwargs)
        backend.refresh_views()
        handle.load(cluster_dir / tag)
        handle.saved(cluster_dir / tag)
        return result

    engine.save_checkpoint, engine.load_checkpoint = save, load


def cluster_directory(base: str | Path, world: World) -> Path:
    """Return the directory of this cluster's checkpoints."""
    return Path(base) / f"cluster_{world.cluster_id}"


def _refuse_partial_load(kwargs: dict[str, Any]) -> None:
    if kwargs.get("load_module_only") or kwargs.get("load_optimizer_states") is False:
        raise ValueError(
            "load_checkpoint without optimizer states leaves the masters and the anchor apart; "
            "load the weights into the model before dsx.initialize instead"
        )
