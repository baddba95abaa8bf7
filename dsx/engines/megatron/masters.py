"""Where Megatron-core's optimizers keep the fp32 masters, and how the weights follow them.

One class per kind of optimizer, by its exact type; what is not known is refused. Checked on
megatron-core 0.16.1; the attributes have the same names in 0.12 to 0.20. None of them communicates
except in `gather`.

Under torch's FSDP2 (`TorchFullyShardedDataParallel`) parameters and fp32 copies of them are DTensors:
a rank's masters are its rows of each, and the next forward gathers weights by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

from dsx.engines.data_parallel import (
    drop_gathered,
    is_dtensor,
    piece_of_shard,
    sharded_modules,
)
from dsx.engines.masters import Piece

SERVED = "FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer"


class MasterPlace(ABC):
    """Where one optimizer, `leaf`, keeps its masters."""

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    @property
    def is_sharded(self) -> bool:
        """Whether ranks that read different data hold different masters."""
        return any(is_dtensor(parameter) for parameter in self.parameters())

    @abstractmethod
    def parameters(self) -> list[Any]:
        """Return the model's parameters that the cluster trains with it, wherever masters lie."""

    @abstractmethod
    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return the parameters whose masters, or parts of them, are on this rank."""

    @abstractmethod
    def copy(self) -> None:
        """Copy this rank's masters to the weights that it holds of them. Local."""


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers that hold parameters: a chain's members, without its stubs."""
    if type(optimizer) is ChainedOptimizer:
        return [leaf for one in optimizer.chained_optimizers for leaf in leaves(one)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def locate(optimizer: Any) -> list[MasterPlace]:
    """Return where the masters are; ValueError for an optimizer that is not known."""
    places: dict[type, Any] = {
        FP32Optimizer: Weights,
        Float16OptimizerWithFloat16Params: Copies,
        DistributedOptimizer: Shards,
    }
    found: list[MasterPlace] = []
    for leaf in leaves(optimizer):
        if type(leaf) not in places:
            raise ValueError(
                f"dsx does not know where {type(leaf).__module__}.{type(leaf).__name__} keeps its "
                f"fp32 masters; it serves {SERVED} and a ChainedOptimizer of them"
            )
        found.append(places[type(leaf)](leaf))
    if len({place.is_sharded for place in found}) > 1:
        raise ValueError(
            "dsx does not serve a ChainedOptimizer with DistributedOptimizer in part; use "
            "use_distributed_optimizer for all parameters or for none"
        )
    return found


class Weights(MasterPlace):
    """fp32: the model's parameters are the masters."""

    def parameters(self) -> list[Any]:
        """Return the parameters."""
        return [p for group in self._leaf.optimizer.param_groups for p in group["params"]]

    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return the parameters themselves."""
        return [entry for p in self.parameters() for entry in _pieces(p, p)]

    def copy(self) -> None:
        """Nothing to copy."""


class Copies(MasterPlace):
    """bf16 and fp16: an fp32 copy of every parameter that is not fp32 itself."""

    def parameters(self) -> list[Any]:
        """Return the parameters."""
        return [parameter for parameter, _ in self._pairs()]

    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return the fp32 copies."""
        return [entry for pair in self._pairs() for entry in _pieces(*pair)]

    def copy(self) -> None:
        """Copy as after a step."""
        self._leaf._copy_main_params_to_model_params()

    def _pairs(self) -> list[tuple[Any, Any]]:
        leaf = self._leaf
        groups = zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True)
        pairs = [pair for weights, masters in groups for pair in zip(weights, masters, strict=True)]
        return pairs + [(p, p) for group in leaf.fp32_from_fp32_groups for p in group]


class Shards(MasterPlace):
    """The distributed optimizer: this rank's range of every bucket, cut through parameters."""

    @property
    def is_sharded(self) -> bool:
        """True."""
        return True

    def parameters(self) -> list[Any]:
        """Return the parameters of all buckets, those that lie on other ranks included."""
        return [
            p for ranges in self._leaf.buffers for bucket in ranges.buckets for p in bucket.params
        ]

    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return what of the parameters lies in this rank's ranges."""
        found: list[tuple[Any, Piece]] = []
        for parameter, (group, index) in self._leaf.model_param_group_index_map.items():
            master = self._leaf.optimizer.param_groups[group]["params"][index]
            part = self._leaf._get_model_param_range_map(parameter)["param"]
            is_whole = part.size == parameter.numel()
            shape = tuple(parameter.shape) if is_whole else (part.size,)
            found.append((parameter, Piece(master, shape, part.start)))
        return found

    def copy(self) -> None:
        """Copy this rank's ranges into the parameter buffers; `gather` takes them further."""
        self._leaf._copy_main_params_to_model_params()


def _pieces(parameter: Any, master: Any) -> list[tuple[Any, Piece]]:
    """Return what of a master is on this rank, if anything is."""
    piece = Piece(master, tuple(parameter.shape))
    if is_dtensor(master):
        piece = piece_of_shard(f"of {tuple(parameter.shape)}", master)
    return [(parameter, piece)] if piece.numel else []


def drop_gathered_of(chunks: Sequence[Any]) -> bool:
    """Let chunks under FSDP2 hold their shards alone; return whether there are any. Local."""
    modules = [module for chunk in chunks for module in sharded_modules(chunk)]
    drop_gathered(modules)
    return bool(modules)


def gather(chunks: Sequence[Any]) -> None:
    """Let every rank's weights be what the masters are, at once.

    All-gathers the parameter buffers: collective over the data- and context-parallel ranks, and the
    experts' own. With overlap_param_gather a gather may be under way, which Megatron then only
    waits for: it is of before. FSDP2 gathers as weights are used, and drops what it holds of before.
    """
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            drop_gathered_of([chunk])
            continue
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        if any(group.param_gather_handle is not None for group in groups):
            chunk.start_param_sync(force_sync=True)
        chunk.start_param_sync(force_sync=True)
