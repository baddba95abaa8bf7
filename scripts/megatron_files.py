"""Checkpoints of megatron-core in the torch_dist format, and a cluster's weights as one dict.

A process that saves must be guarded by `if __name__ == "__main__"`: dist_checkpointing starts
processes that import the script again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch import Tensor

from dsx.checkpoint.tags import write_durably

TRACKER = "latest_checkpointed_iteration.txt"


def save_checkpoint(
    directory: Path, iteration: int, chunks: Sequence[Any], optimizer: Any, scheduler: Any = None
) -> None:
    """Save in the torch_dist format under the name that Megatron gives; all ranks call it."""
    path = directory / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, scheduler, is_loading=False)
    dist_checkpointing.save(state, str(path))
    dist.barrier()
    if dist.get_rank() == 0:
        write_durably(directory / TRACKER, str(iteration))
    dist.barrier()


def load_checkpoint(
    directory: Path,
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any = None,
    iteration: int | None = None,
) -> int:
    """Load an iteration, by default what the tracker names, and return its number.

    FileNotFoundError if there is none.
    """
    tracker = directory / TRACKER
    if iteration is None and not tracker.is_file():
        raise FileNotFoundError(f"no {tracker}: nothing has been saved there")
    iteration = int(tracker.read_text()) if iteration is None else iteration
    path = directory / f"iter_{iteration:07d}"
    _allocate_moments(optimizer)
    wanted = _sharded_state(chunks, optimizer, scheduler, is_loading=True)
    state = dist_checkpointing.load(wanted, str(path))
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(state[f"model{index}"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    _restore_steps(optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    return iteration


def _sharded_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's AdamW where it stands in for a fused one in a distributed optimizer."""
    found: list[torch.optim.Optimizer] = []
    for leaf in optimizer.chained_optimizers:
        is_sharded = hasattr(leaf, "model_param_group_index_map")
        if is_sharded and isinstance(leaf.optimizer, torch.optim.AdamW):
            found.append(leaf.optimizer)
    return found


def _allocate_moments(optimizer: Any) -> None:
    """Give AdamW the state that megatron-core 0.16 expects it to have before it loads any."""
    for adam in _sharded_optimizers(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter].update(step=torch.tensor(0.0), **moments)


def _restore_steps(optimizer: Any) -> None:
    """Give each parameter the step count that megatron-core 0.16 leaves with its group."""
    for adam in _sharded_optimizers(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]))


def _sharded_state(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, is_loading: bool
) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state: dict[str, Any] = {
        f"model{index}": unwrapped(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading, metadata=metadata)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


def gather_weights(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the cluster's weights in fp32, by name, on rank 0; all ranks of the cluster call it.

    Slices are put together along the dimension that tensor parallelism cuts them; experts have
    their number in the layer.
    """
    own: dict[str, tuple[int, int | None, Tensor]] = {}
    rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        model = unwrapped(chunk)
        for name, weight in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                layer = model.decoder.layers[int(parts[2])]
                parts[2] = str(layer.layer_number - 1)
                if "local_experts" in parts:
                    place = parts.index("local_experts") + 1
                    first = expert_rank * layer.mlp.num_local_experts
                    parts[place] = str(first + int(parts[place]))
            is_cut = getattr(weight, "tensor_model_parallel", False)
            dimension = weight.partition_dim if is_cut else None
            own[".".join(parts)] = (rank if is_cut else 0, dimension, weight.detach().float().cpu())
    is_writer = dist.get_rank() == 0
    everyone: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
    dist.gather_object(own, everyone)
    slices: dict[str, dict[int, Tensor]] = {}
    dimensions: dict[str, int | None] = {}
    for weights in everyone or []:
        for name, (place, dimension, weight) in weights.items():
            slices.setdefault(name, {})[place] = weight
            dimensions[name] = dimension
    return {
        name: torch.cat([parts[k] for k in sorted(parts)], dim=dimensions[name] or 0)
        for name, parts in slices.items()
    }


def unwrapped(chunk: Any) -> Any:
    """Return the model inside Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
