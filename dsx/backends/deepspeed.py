"""DeepSpeed as the inner engine: ZeRO-0 and ZeRO-1, fp32, bf16 and fp16, unmodified.

The outer update happens inside the inner step, in the step hook of `engine.basic_optimizer`: the
fp32 masters are updated, the bit16 weights not yet copied, so DeepSpeed's own copy and all-gather
carry our change and nothing is sent twice. Traps that the code answers:

- the hook fires once per parameter group under ZeRO-1: we act in the last firing, when all
  masters are fresh, and redo the local bit16 copy of the groups that were stepped before;
- it does not fire on an overflow step: the boundary still counts (`_take_model_step` is wrapped),
  or the clusters' clocks would drift apart, and what was written is published by a collective;
- whether to publish is decided from the schedule, never from "do I own something": it is a
  collective and a rank may own nothing of a fragment.

Where the masters are is found by the attributes of the optimizer wrapper, not by the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.backends.base import Masters, Piece
from dsx.fragment import Fragmenter
from dsx.schedule.periodic import BackwardTrigger
from dsx.types import Fragment, ParameterShape, Stage


class DeepSpeedBackend:
    """One rank's masters inside a `DeepSpeedEngine`."""

    def __init__(self, engine: Any, fragmenter: Fragmenter) -> None:
        refuse_unsupported(engine)
        self._engine = engine
        parameters = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        self._shapes = [ParameterShape(n, tuple(p.shape)) for n, p in parameters.items()]
        self._assignment = fragmenter.assign(self._shapes)
        self.stage = Stage()
        self.refresh_views()
        self._expected: set[int] | None = None  # masters of the step being taken, if any
        self._stepped: set[int] = set()
        self._is_passed = False

    def refresh_views(self) -> None:
        """Find the masters again, after the engine may have replaced its tensors."""
        pieces = find_masters(self._engine)
        self._masters = Masters(self._shapes, self._assignment, pieces)
        self.fragments = self._masters.fragments
        self.fragment_numel = self._masters.fragment_numel
        self.fragment_parameters = self._masters.fragment_parameters
        self.device = next(iter(pieces.values())).master.device if pieces else torch.device("cpu")

    def read(self, fragment: int, out: Tensor) -> None:
        """Copy this rank's masters of a fragment into `out`, in place."""
        self._masters.read(fragment, out)

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite this rank's masters of a fragment, in place."""
        self._masters.write(fragment, source)

    def publish(self) -> None:
        """Copy masters to bit16 weights and all-gather them; collective in the cluster."""
        wrapper = self._engine.optimizer
        if hasattr(wrapper, "update_lp_params"):  # ZeRO-1 and BF16_Optimizer
            wrapper.update_lp_params()
        else:
            self._copy_whole_masters()

    def inner_lr(self) -> float:
        """Return the first parameter group's rate."""
        return float(self._engine.basic_optimizer.param_groups[0]["lr"])

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the shards' sum in rank order; under ZeRO-0 ranks hold copies, not shards."""
        if self._engine.zero_optimization_stage() == 0:
            return values
        total = torch.zeros_like(values)
        for shard in self._gather(values):
            total.add_(shard)
        return total

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise largest of the cluster's ranks."""
        return torch.stack(self._gather(values)).amax(0)

    def cluster_layouts(self) -> tuple[Sequence[Sequence[Fragment]], int]:
        """Return every rank's fragments; this one's alone under ZeRO-0, where all hold all."""
        if self._engine.zero_optimization_stage() == 0:
            return [self.fragments], 0
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self.fragments)
        return everyone, torch.distributed.get_rank()

    def swap_in_cluster(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Exchange shards over the cluster's world, on the device of its backend."""
        device = self._collective_device()
        sent = torch.cat([t.to(device) for t in outgoing])
        received = torch.empty(sum(t.numel() for t in incoming), device=device)
        here, away = [[t.numel() for t in tensors] for tensors in (incoming, outgoing)]
        torch.distributed.all_to_all_single(received, sent, here, away)
        for tensor, part in zip(incoming, received.split(here), strict=True):
            tensor.copy_(part)

    def _collective_device(self) -> torch.device:
        """Return where the backend of the cluster's world takes tensors."""
        is_nccl = torch.distributed.get_backend() == "nccl"
        return self.device if is_nccl else torch.device("cpu")

    def _gather(self, values: Tensor) -> list[Tensor]:
        """Return every rank's values."""
        own = values.to(self._collective_device())
        everyone = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, own)
        return [other.to(values.device) for other in everyone]

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Refuse: DeepSpeed reduces gradients in buckets, across layers, on its own schedule."""
        raise ValueError(
            f"dsx.schedule.type='layerwise' (when={when!r}) launches a layer inside the backward, "
            "where DeepSpeed's gradients are not reduced yet; use schedule.type='streaming' with "
            "delay.type='average' for layer-wise averaging at step boundaries, or plain PyTorch "
            "with dsx.attach(model, optimizer)"
        )

    def end_inner_step(self) -> None:
        """Nothing to do: the backward is DeepSpeed's own."""

    def backward_seconds(self, fragment: int) -> float | None:
        """Return None: the backward is DeepSpeed's own."""
        return None

    def on_inner_step(self, callback: Callable[[], bool]) -> None:
        """Call back once per step boundary; it returns whether it wrote masters."""
        engine = self._engine
        take_model_step = engine._take_model_step

        def after_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._expected is None or self._is_passed:
                return
            self._stepped |= _parameter_ids(optimizer)
            if self._stepped >= self._expected:
                self._is_passed = True
                if callback():
                    self._recopy_stepped_groups()

        def take(*args: Any, **kwargs: Any) -> None:
            self._expected = _parameter_ids(engine.basic_optimizer)
            self._stepped = set()
            self._is_passed = False
            take_model_step(*args, **kwargs)
            self._expected = None
            if not self._is_passed and callback():  # overflow: the optimizer did not step
                self.publish()

        engine.basic_optimizer.register_step_post_hook(after_optimizer)
        engine._take_model_step = take

    def _recopy_stepped_groups(self) -> None:
        """Copy masters to bit16 partitions again where DeepSpeed did so before our write."""
        wrapper = self._engine.optimizer
        if not hasattr(wrapper, "single_partition_of_fp32_groups"):
            return  # these wrappers copy all groups after the hook
        ranks = wrapper.real_dp_process_group
        partitions = wrapper.parallel_partitioned_bit16_groups
        for index, master in enumerate(wrapper.single_partition_of_fp32_groups[:-1]):
            partition = partitions[index][torch.distributed.get_rank(ranks[index])]
            partition.data.copy_(master.data)

    def _copy_whole_masters(self) -> None:
        wrapper = self._engine.optimizer
        if hasattr(wrapper, "fp32_groups"):  # FP16_UnfusedOptimizer
            pairs = zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)
            for masters, weights in pairs:
                for master, weight in zip(masters, weights, strict=True):
                    weight.data.copy_(master.data)
        elif hasattr(wrapper, "fp32_groups_flat"):  # FP16_Optimizer (fused)
            pairs = zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True)
            for flat, weights in pairs:
                for weight, (start, stop) in zip(weights, _running_ranges(weights), strict=True):
                    weight.data.copy_(flat.data[start:stop].view_as(weight))


def refuse_unsupported(engine: Any) -> None:
    """Raise ValueError, naming the feature, for what this adapter does not serve."""
    stage = engine.zero_optimization_stage()
    offload = engine.zero_offload_optimizer()
    refused = {
        f"zero_optimization.stage={stage}": stage not in (0, 1),
        "pipeline parallelism": bool(engine.pipeline_parallelism),
        "zero_optimization.offload_optimizer": offload is not None and offload.device != "none",
        "mixture of experts": bool(engine.has_moe_layers),
        "torch_autocast": bool(engine.torch_autocast_enabled()),
    }
    for feature, is_used in refused.items():
        if is_used:
            raise ValueError(
                f"dsx does not serve {feature} of DeepSpeed yet; supported are ZeRO stages 0 and 1 "
                "in fp32, bf16 and fp16 without offload"
            )
    if not hasattr(engine, "_take_model_step"):
        raise RuntimeError(
            f"this DeepSpeed has no {type(engine).__name__}._take_model_step, the step boundary "
            "that dsx counts; use a version that pyproject.toml names"
        )


def find_masters(engine: Any) -> dict[str, Piece]:
    """Return `{parameter name: piece}` for what this rank owns in fp32, padding excluded."""
    wrapper = engine.optimizer
    pieces: dict[str, Piece] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "_hp_mapping"):
            piece = _mapped_piece(wrapper, parameter)
        else:
            piece = _whole_piece(wrapper, parameter)
        if piece is not None:
            if piece.master.dtype != torch.float32:
                raise ValueError(
                    f"the master copy of {name} is {piece.master.dtype}, not fp32; unset "
                    "bf16_master_weights_and_grads / fp16_master_weights_and_grads"
                )
            pieces[name] = piece
    return pieces


def _mapped_piece(wrapper: Any, parameter: Any) -> Piece | None:
    """ZeRO-1 and BF16_Optimizer: a range of this rank's flat partition; None if not here."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    if hasattr(wrapper, "single_partition_of_fp32_groups"):
        partitions = wrapper.single_partition_of_fp32_groups
    else:
        partitions = wrapper.fp32_groups_flat_partition
    address = mapping.get_hp_fragment_address()
    flat = partitions[mapping.param_group_index].data
    shape = tuple(parameter.shape) if address.numel == parameter.numel() else (address.numel,)
    start = mapping.lp_fragment_address.start
    return Piece(flat.narrow(0, address.start, address.numel), shape, start)


def _whole_piece(wrapper: Any, parameter: Tensor) -> Piece:
    """ZeRO-0: the parameter itself, or its fp32 copy in a bit16 wrapper."""
    shape = tuple(parameter.shape)
    if hasattr(wrapper, "fp32_groups"):
        for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                if weight is parameter:
                    return Piece(master.data, shape)
    elif hasattr(wrapper, "fp32_groups_flat"):
        for flat, weights in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True):
            for weight, (start, stop) in zip(weights, _running_ranges(weights), strict=True):
                if weight is parameter:
                    return Piece(flat.data[start:stop], shape)
    return Piece(parameter, shape)


def _running_ranges(tensors: Any) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    start = 0
    for tensor in tensors:
        ranges.append((start, start + tensor.numel()))
        start += tensor.numel()
    return ranges


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def start_engine(**arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize`, without its shared-memory collective on CPU-only hosts.

    That one serves inference only, needs a C++ build of a minute or two at the first start, and
    ignores process groups.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cpu":
        __compatible_ops__["deepspeed_shm_comm"] = False
    start: Any = deepspeed.initialize
    return start(**arguments)
