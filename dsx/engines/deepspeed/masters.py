"""Where DeepSpeed's optimizer wrappers keep the fp32 masters, and how bit16 weights follow them.

One class per kind of wrapper, found by its attributes and not by the ZeRO stage: the same stage has
several wrappers, by data types and optimizer (deepspeed/runtime, 0.19). None of them communicates
except in `sync_model_weights`. What the code answers:

- ZeRO-3 pads every parameter to a multiple of the ranks with *uninitialised* memory, so a piece is
  cut to the parameter's own elements; its shape is `ds_shape`, `shape` is that of a placeholder;
- ZeRO-1/2 copy masters to bit16 after each parameter group's step, ZeRO-3 after each sub-group's:
  the groups that were stepped before we write need the copy again (`refresh`), a local one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.engines.deepspeed.parameters import whole_shape
from dsx.engines.deepspeed.private import copy_sub_group, let_go_of_gathered
from dsx.engines.masters import Piece, has_values


class MasterPlace(ABC):
    """Where one kind of optimizer wrapper keeps its masters.

    `is_sharded`: whether each rank of the cluster holds a part, and not all of them the same.
    """

    is_sharded = False

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @abstractmethod
    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return what this rank holds of the trained parameters, padding excluded."""

    @abstractmethod
    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return the tensors that the basic optimizer steps, in one firing of its hook or several.

        In order: the last one is stepped last.
        """

    def refresh(self) -> None:  # noqa: B027 - of those that fire once, nothing
        """Copy masters to bit16 again where DeepSpeed did so before the last firing. Local."""

    @abstractmethod
    def sync_model_weights(self) -> None:
        """Copy all masters to bit16 and gather them as DeepSpeed does after a step. Collective."""


def locate(engine: Any) -> MasterPlace:
    """Return where the engine's wrapper keeps the masters; ValueError for an unknown wrapper."""
    wrapper = engine.optimizer
    places = {
        "fp32_partitioned_groups_flat": ParameterShards,  # ZeRO-3
        "single_partition_of_fp32_groups": GroupPartitions,  # ZeRO-1/2
        "fp32_groups_flat_partition": Bf16Partitions,  # BF16_Optimizer
        "fp32_groups_flat": FlatCopies,  # FP16_Optimizer, the fused one
        "fp32_groups": Copies,  # FP16_UnfusedOptimizer
    }
    for attribute, place in places.items():
        if hasattr(wrapper, attribute):
            return place(wrapper)
    if wrapper is not engine.basic_optimizer:
        raise ValueError(
            f"dsx does not know where {type(wrapper).__name__} keeps its fp32 masters; use a ZeRO "
            "stage of 0 to 3 with an ordinary optimizer"
        )
    return Weights(wrapper)


def require_fp32(pieces: Mapping[str, Piece]) -> None:
    """Raise ValueError for masters of another type."""
    for name, piece in pieces.items():
        if piece.master.dtype != torch.float32:
            raise ValueError(
                f"the master copy of {name} is {piece.master.dtype}, not fp32; unset "
                "bf16_master_weights_and_grads / fp16_master_weights_and_grads"
            )


class Weights(MasterPlace):
    """fp32 without ZeRO: the model's parameters are the masters."""

    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return the parameters."""
        return {name: Piece(p, tuple(p.shape)) for name, p in parameters.items()}

    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return the parameters."""
        return [p for group in self._wrapper.param_groups for p in group["params"]]

    def sync_model_weights(self) -> None:
        """Nothing to copy."""


class Copies(MasterPlace):
    """Bit16 without ZeRO: an fp32 copy of every parameter, all copied back after the one step."""

    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return the fp32 copies."""
        masters = {id(weight): master for master, weight in self._pairs()}
        return {n: Piece(masters[id(p)], tuple(p.shape)) for n, p in parameters.items()}

    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return the fp32 copies."""
        return [master for master, _ in self._pairs()]

    def sync_model_weights(self) -> None:
        """Copy each master to its weight."""
        for master, weight in self._pairs():
            weight.data.copy_(master.data)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        groups = zip(self._wrapper.fp32_groups, self._wrapper.fp16_groups, strict=True)
        return [pair for masters, weights in groups for pair in zip(masters, weights, strict=True)]


class FlatCopies(MasterPlace):
    """Bit16 without ZeRO, fused optimizer: one flat fp32 copy per group, of running offsets."""

    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return the parameters' ranges of the flat copies."""
        places = {id(weight): piece for piece, weight in self._pairs()}
        return {name: places[id(p)] for name, p in parameters.items()}

    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return the flat copies."""
        return self._wrapper.fp32_groups_flat

    def sync_model_weights(self) -> None:
        """Copy each range to its weight."""
        for piece, weight in self._pairs():
            weight.data.copy_(piece.view().view_as(weight))

    def _pairs(self) -> list[tuple[Piece, Tensor]]:
        pairs: list[tuple[Piece, Tensor]] = []
        groups = zip(self._wrapper.fp32_groups_flat, self._wrapper.fp16_groups, strict=True)
        for flat, weights in groups:
            offset = 0
            for weight in weights:
                pairs.append((Piece(flat, tuple(weight.shape), offset=offset), weight))
                offset += weight.numel()
        return pairs


class Bf16Partitions(MasterPlace):
    """bf16 with fp32 gradient accumulation: a part of each group; all copied after the one step."""

    is_sharded = True

    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return what of the parameters lies in this rank's part."""
        wrapper, masters = self._wrapper, self.optimizer_tensors()
        return _cut_to_partitions(parameters, wrapper.bf16_groups_flat, masters, _ranks(wrapper))

    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return this rank's part of each group."""
        return self._wrapper.fp32_groups_flat_partition

    def sync_model_weights(self) -> None:
        """Copy and all-gather as after a step."""
        self._wrapper.update_lp_params()


class GroupPartitions(MasterPlace):
    """ZeRO-1 and ZeRO-2: this rank's part of each flattened parameter group, on the host or not."""

    is_sharded = True

    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return what of the parameters lies in this rank's part."""
        wrapper, masters = self._wrapper, self.optimizer_tensors()
        return _cut_to_partitions(parameters, wrapper.bit16_groups_flat, masters, _ranks(wrapper))

    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return this rank's part of each group, which is stepped on its own."""
        return self._wrapper.single_partition_of_fp32_groups

    def refresh(self) -> None:
        """Copy this rank's part of the groups before the last to bit16 again."""
        partitions = self._wrapper.parallel_partitioned_bit16_groups
        groups = zip(self.optimizer_tensors(), partitions, _ranks(self._wrapper), strict=True)
        for master, ranks, rank in list(groups)[:-1]:
            ranks[rank].data.copy_(master.data)

    def sync_model_weights(self) -> None:
        """Copy and all-gather as after a step."""
        _require_reloaded(self._wrapper)
        self._wrapper.update_lp_params()


class ParameterShards(MasterPlace):
    """ZeRO-3: this rank's shard of every parameter, flattened by sub-group, on the host or not."""

    is_sharded = True

    def pieces(self, parameters: Mapping[str, Any]) -> dict[str, Piece]:
        """Return the shards, cut to what is not padding."""
        pieces: dict[str, Piece] = {}
        for name, p in parameters.items():
            group, offset, numel = self._wrapper.grad_position[self._wrapper.get_param_id(p)]
            start = dist.get_rank(p.ds_process_group) * numel
            valid = min(numel, p.ds_numel - start)
            if valid > 0:
                shape = whole_shape(p) if valid == p.ds_numel else (valid,)
                pieces[name] = Piece(self.optimizer_tensors()[group], shape, start, offset)
        return pieces

    def optimizer_tensors(self) -> Sequence[Tensor]:
        """Return this rank's flat sub-groups; each is the optimizer's only while it is stepped."""
        return self._wrapper.fp32_partitioned_groups_flat

    def refresh(self) -> None:
        """Copy the sub-groups before the last to their bit16 shards again."""
        for index in range(len(self.optimizer_tensors()) - 1):
            copy_sub_group(self._wrapper, index)

    def sync_model_weights(self) -> None:
        """Copy all sub-groups to their shards, and gather anew what stays gathered."""
        wrapper = self._wrapper
        _require_reloaded(wrapper)
        let_go_of_gathered(wrapper)
        for index in range(len(self.optimizer_tensors())):
            copy_sub_group(wrapper, index)
        persistent = wrapper.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def _ranks(wrapper: Any) -> list[int]:
    """Return this rank's place among those that share each group."""
    return [dist.get_rank(group) for group in wrapper.real_dp_process_group]


def _cut_to_partitions(
    parameters: Mapping[str, Any],
    flats: Sequence[Tensor],
    masters: Sequence[Tensor],
    ranks: Sequence[int],
) -> dict[str, Piece]:
    """Return what of each parameter lies in this rank's part of its flattened group.

    A parameter's place is where its bit16 data is in the flat buffer. `_hp_mapping` says so, too,
    but is wrong with round_robin_gradients (0.19.8), and gone after `offload_states`.
    """
    pieces: dict[str, Piece] = {}
    for name, p in parameters.items():
        for flat, master, rank in zip(flats, masters, ranks, strict=True):
            place = _place_in(flat, p)
            if 0 <= place < flat.numel():
                first = rank * master.numel() - place  # of the part, counted in the parameter
                piece = Piece(master, tuple(p.shape), 0, -first).cut(first, first + master.numel())
                if piece is not None:
                    pieces[name] = piece
    return pieces


def _place_in(flat: Tensor, parameter: Tensor) -> int:
    """Return where a parameter's data begins, in elements of `flat`; outside of it, if it does."""
    if has_values(flat):
        return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
    storages: list[Any] = [tensor.untyped_storage() for tensor in (parameter, flat)]
    if storages[0]._cdata != storages[1]._cdata:
        return -1
    return int(parameter.storage_offset()) - int(flat.storage_offset())


def _require_reloaded(wrapper: Any) -> None:
    offloaded = [state.value for state in getattr(wrapper, "offloaded_states", ())]
    if offloaded:
        raise RuntimeError(
            f"engine.offload_states() holds {sorted(offloaded)} away from the model, which has to "
            "take new weights now; call engine.reload_states() first"
        )
