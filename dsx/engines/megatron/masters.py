"""Where Megatron-core's optimizers keep the fp32 masters, and how the weights follow them.

One class per kind of optimizer, by its exact type; what is not known is refused. Checked on
megatron-core 0.16.1; the attributes have the same names in 0.12 to 0.20. None of them communicates
except in `gather`.
What is fully sharded is in fully_sharded.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

from dsx.engines.data_parallel import is_dtensor
from dsx.engines.masters import Piece
from dsx.engines.masters_apart import ApartPiece
from dsx.engines.megatron.fully_sharded import (
    drop_gathered_of,
    end_gathers,
    is_megatron_fsdp,
    own,
    pieces_of,
)
from dsx.engines.megatron.precision_aware import is_inside, piece_of
from dsx.engines.megatron.private import require_names_of_fsdp
from dsx.engines.megatron.refusals import INSIDE_OF_BOTH, refuse

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
        is_in_buffers = getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False)
        if is_in_buffers and is_inside(leaf):
            refuse({"Megatron-FSDP with use_precision_aware_optimizer": INSIDE_OF_BOTH})
        found.append((BufferShards if is_in_buffers else places[type(leaf)])(leaf))
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
        return [entry for p in self.parameters() for entry in pieces_of(p, p)]

    def copy(self) -> None:
        """Nothing to copy."""


class Copies(MasterPlace):
    """bf16 and fp16: an fp32 copy of every parameter that is not fp32 itself."""

    def parameters(self) -> list[Any]:
        """Return the parameters."""
        return [parameter for parameter, _ in self._pairs()]

    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return the fp32 copies."""
        return [entry for pair in self._pairs() for entry in pieces_of(*pair)]

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
        inner = self._leaf.optimizer
        for parameter, (group, index) in self._leaf.model_param_group_index_map.items():
            master = inner.param_groups[group]["params"][index]
            part = self._leaf._get_model_param_range_map(parameter)["param"]
            is_whole = part.size == parameter.numel()
            shape = tuple(parameter.shape) if is_whole else (part.size,)
            make = partial(piece_of, inner) if is_inside(self._leaf) else Piece
            found.append((parameter, make(master, shape, part.start)))
        return found

    def copy(self) -> None:
        """Copy this rank's ranges into the parameter buffers; `gather` takes them further."""
        self._leaf._copy_main_params_to_model_params()
        if is_inside(self._leaf):  # which copies nothing then: its optimizer does in its step
            for _, piece in self.pieces():
                if isinstance(piece, ApartPiece):
                    piece.master.detach().copy_(piece.flat())


class BufferShards(MasterPlace):
    """Megatron-FSDP: this rank's range of every group of parameters."""

    @property
    def is_sharded(self) -> bool:
        """True."""
        return True

    def parameters(self) -> list[Any]:
        """Return the model's parameters, those that lie on other ranks included."""
        return [own(p) for group in self._leaf.optimizer.param_groups for p in group["params"]]

    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return what of the parameters lies in this rank's ranges."""
        require_names_of_fsdp()
        trained = {id(parameter) for parameter in self.parameters()}
        chunks = self._leaf.model_chunks
        return [entry for chunk in chunks for entry in _pieces_in_buffers(chunk, trained)]

    def copy(self) -> None:
        """Copy this rank's ranges to what is gathered from; `gather` takes them further."""
        for chunk in self._leaf.model_chunks:
            end_gathers(chunk)
        self._leaf._copy_main_params_to_model_params()


def gather(chunks: Sequence[Any], at_once: bool = False) -> None:
    """Let every rank's weights be what the masters are: at once, or with the next forward.

    All-gathers the parameter buffers: collective over the data- and context-parallel ranks, and
    the experts' own. With overlap_param_gather the next forward does it. Then a gather may be
    under way, which Megatron would only wait for: it is of before. FSDP2 gathers as weights are
    used, and drops what it holds of before; Megatron-FSDP begins as it does after a step.
    """
    for chunk in chunks:
        if is_megatron_fsdp(chunk):
            chunk.start_param_sync()
        elif not isinstance(chunk, DistributedDataParallel):
            drop_gathered_of([chunk])
        elif at_once or not chunk.ddp_config.overlap_param_gather:
            groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            if any(group.param_gather_handle is not None for group in groups):
                chunk.start_param_sync(force_sync=True)
            chunk.start_param_sync(force_sync=True)


def _pieces_in_buffers(chunk: Any, trained: set[int]) -> Iterator[tuple[Any, Piece]]:
    """Yield what of the parameters of these ids lies in this rank's ranges of Megatron-FSDP."""
    for group in chunk.param_and_grad_buffer.parameter_groups:
        masters = group.main_weight_buffer
        masters = group.model_weight_buffer if masters is None else masters
        for item, parameter in enumerate(group.params):
            start, end = masters._get_item_slice_in_shard(item)
            if end > start and id(parameter) in trained:
                offset, _ = masters._get_item_local_shard_index(item)
                is_whole = end - start == parameter.numel()
                shape = tuple(parameter.shape) if is_whole else (end - start,)
                yield parameter, Piece(masters.data, shape, start, offset)
