"""How a plain PyTorch model lies over the ranks of its cluster, and what of that is not served.

DistributedDataParallel: every rank holds all of it. `fully_shard` (FSDP2): the fp32 shards that its
optimizer steps are the masters, rows of every parameter, cut as torch.chunk cuts; with replicas of
the shards (HSDP) those that hold the same shard are copies. Whatever would leave the ranks of a
cluster with models that differ, or cuts parameters otherwise (tensor parallelism), is refused.

A module of FSDP2 may hold gathered copies of its shards (its root after an evaluation): nothing
that is written to the shards would reach them, so they are dropped, which is local.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsx.engines.masters import Piece

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, activation checkpointing


class LocalPiece(Piece):
    """What of a DTensor lies on this rank."""

    def flat(self) -> Tensor:
        """Return this rank's elements, in a row."""
        master: Any = self.master.detach()
        return master.to_local().view(-1)


@dataclass(frozen=True)
class Placement:
    """A model over the ranks of a cluster: what this rank holds, and the group that holds the same.

    `copies` is None where nobody else does. `engine` is what holds it, for messages and refusals.
    """

    engine: str
    pieces: Mapping[str, Piece]
    copies: Any
    shards: Sequence[Any] = ()  # modules of FSDP2

    def drop_gathered(self) -> None:
        """Drop copies gathered from the shards. Local."""
        drop_gathered(self.shards)


def bare_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have without torch's wrappers.

    Copies that FSDP2 has gathered, which would stand in their place, are dropped.
    """
    drop_gathered(sharded_modules(model))
    wrappers = {name for name, m in model.named_modules() if isinstance(m, DistributedDataParallel)}
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        path, kept = "", list[str]()
        for part in name.split("."):
            if part not in _WRAPPED and not (part == "module" and path in wrappers):
                kept.append(part)
            path = f"{path}.{part}".lstrip(".")
        found[".".join(kept)] = parameter
    return found


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def drop_gathered(modules: Sequence[Any]) -> None:
    """Let modules of FSDP2 hold their shards alone, and gather them anew when they are used."""
    for module in modules:
        module.reshard()


def find_placement(
    model: nn.Module, trained: Mapping[str, nn.Parameter], num_ranks: int, num_clusters: int
) -> Placement | None:
    """Return how the ranks of this cluster hold what is trained; None for one rank's own model.

    ValueError names what is not served.
    """
    shards = sharded_modules(model)
    fewer = f"start one process per cluster ({num_clusters} in all)"
    if shards or any(is_dtensor(p) for p in trained.values()):
        return _of_shards(trained, shards, num_ranks)
    if num_ranks == 1:
        return None
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) is not served with several ranks per cluster: use "
            f"torch.distributed.fsdp.fully_shard(model), or {fewer}"
        )
    return _of_copies(model, trained, num_ranks, fewer)


def _of_copies(
    model: nn.Module, trained: Mapping[str, nn.Parameter], num_ranks: int, fewer: str
) -> Placement:
    """Return the placement under DistributedDataParallel."""
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if not wrappers:
        raise ValueError(
            f"this cluster has {num_ranks} ranks, each of which would train a "
            f"{type(model).__name__} of its own: attach "
            "torch.nn.parallel.DistributedDataParallel(model), which keeps them equal, or a model "
            f"that torch.distributed.fsdp.fully_shard has sharded, or {fewer}"
        )
    alike: set[int] = set()
    for wrapper in wrappers:
        require_whole_cluster(dist.get_world_size(wrapper.process_group), num_ranks)
        ignored: set[str] = wrapper.parameters_to_ignore
        named = wrapper.module.named_parameters()
        alike |= {id(p) for name, p in named if name not in ignored}
    for name, parameter in trained.items():
        if id(parameter) not in alike:
            raise ValueError(
                f"parameter {name} is trained outside of DistributedDataParallel, so it would "
                f"differ between the {num_ranks} ranks of a cluster: wrap a module that has it, "
                f"too, or {fewer}"
            )
    pieces = {name: Piece(p, tuple(p.shape)) for name, p in trained.items()}
    return Placement("DistributedDataParallel", pieces, dist.group.WORLD)


def require_whole_cluster(size: int, num_ranks: int) -> None:
    """Raise ValueError where a model is spread over fewer ranks than the cluster has."""
    if size != num_ranks:
        raise ValueError(
            f"the model is spread over {size} of this cluster's {num_ranks} ranks: dsx serves "
            "DistributedDataParallel and fully_shard over all of them; leave out the "
            "process_group or mesh"
        )


def _of_shards(
    trained: Mapping[str, nn.Parameter], modules: Sequence[Any], num_ranks: int
) -> Placement:
    """Return the placement under FSDP2."""
    places: list[tuple[Any, list[str]]] = []  # the mesh, and what lies along each of its sides
    pieces: dict[str, Piece] = {}
    for name, parameter in trained.items():
        if not is_dtensor(parameter) or not modules:
            _refuse_placement(name, parameter)
        places.append((_require_data_parallel(name, parameter), _forms(parameter)))
        if places[-1] != places[0]:
            own, others = (
                f"{' and '.join(forms)} over {mesh}" for mesh, forms in (places[-1], places[0])
            )
            raise ValueError(
                f"parameter {name} is placed as {own}, and others as {others}: dsx "
                "serves one placement for all; give fully_shard the same mesh everywhere"
            )
        piece = piece_of_shard(name, parameter)
        if piece.numel:
            pieces[name] = piece
    mesh, forms = places[0]
    require_whole_cluster(mesh.size(), num_ranks)
    is_replicated = forms[0] == "Replicate"
    return Placement("fully_shard", pieces, mesh.get_group(0) if is_replicated else None, modules)


def is_dtensor(parameter: Any) -> bool:
    """Whether a parameter lies over the ranks of a device mesh."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")


def _forms(parameter: Any) -> list[str]:
    """Return a DTensor's placements as words; `Shard` only where it cuts rows as FSDP2 does."""
    from torch.distributed.tensor import Replicate, Shard

    known = {Replicate: "Replicate", Shard: "Shard"}
    return [
        known.get(type(p), "") if getattr(p, "dim", 0) == 0 else "" for p in parameter.placements
    ]


def _require_data_parallel(name: str, parameter: Any) -> Any:
    """Return the mesh of a parameter that FSDP2, or HSDP, has placed; ValueError for another."""
    if _forms(parameter) not in (["Shard"], ["Replicate", "Shard"], ["Replicate"]):
        _refuse_placement(name, parameter)
    return parameter.device_mesh


def _refuse_placement(name: str, parameter: Any) -> None:
    where = "on every rank for itself, not sharded"
    if is_dtensor(parameter):
        names = parameter.device_mesh.mesh_dim_names
        where = f"placed as {tuple(parameter.placements)}" + (f" over {names}" if names else "")
    raise ValueError(
        f"parameter {name} lies {where}: dsx serves what fully_shard cuts along dimension 0, over "
        "a mesh of one dimension or with replicas (HSDP); leave out tensor parallelism, "
        "shard_placement_fn and ignored_params, or train with Megatron"
    )


def piece_of_shard(name: str, parameter: Any) -> Piece:
    """Return this rank's rows of a parameter; ValueError where FSDP2 would have cut others."""
    whole = tuple(parameter.shape)
    local: Tensor = parameter.detach().to_local()
    if _forms(parameter) == ["Replicate"]:
        return LocalPiece(parameter, whole)
    mesh = parameter.device_mesh
    rows = -(-whole[0] // mesh.size(mesh.ndim - 1))
    first = min(mesh.get_local_rank(mesh.ndim - 1) * rows, whole[0])
    numel = (min(first + rows, whole[0]) - first) * math.prod(whole[1:])
    if local.numel() != numel or not local.is_contiguous():
        raise ValueError(
            f"parameter {name} of shape {whole} has {tuple(local.shape)} on this rank, where rows "
            f"{first} to {first + rows} were expected: dsx serves the shards of fully_shard alone"
        )
    is_whole = numel == math.prod(whole)
    return LocalPiece(parameter, whole if is_whole else (numel,), first * math.prod(whole[1:]))
