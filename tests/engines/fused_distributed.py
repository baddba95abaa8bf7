"""A double of apex's DistributedFusedAdam, which needs a GPU, and what lets the real one run here.

The double was written from `apex/contrib/optimizers/distributed_fused_adam.py` of July 2026: it
lays parameters into buckets, and keeps shards and where they lie, as that does; it steps by torch,
and takes gradients when it steps, where that takes them as they come. `of_tree` gives the real
class of a tree of apex, with its kernels written in torch.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.fused import adamw

_CLASS = "apex.contrib.optimizers.distributed_fused_adam"


class DistributedFusedAdam(torch.optim.Optimizer):
    """AdamW of fp32 masters in shards of buckets; `param_sync_dtype` is what weights travel in."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        param_sync_dtype: torch.dtype | None = None,
        process_group: Any = None,
        distributed_process_group: Any = None,
        redundant_process_group: Any = None,
        average_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        store_params: bool = True,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.dtype, self.param_sync_dtype = dtype, param_sync_dtype or dtype
        self.process_group = process_group or dist.group.WORLD
        self.distributed_process_group = distributed_process_group or self.process_group
        self.redundant_process_group = redundant_process_group
        self.process_group_size = dist.get_world_size(self.process_group)
        self.distributed_rank = dist.get_rank(self.distributed_process_group)
        self.distributed_size = dist.get_world_size(self.distributed_process_group)
        self.redundant_size = self.process_group_size // self.distributed_size
        self.average_grad_sync, self.overlap_param_sync = average_grad_sync, overlap_param_sync
        self.store_params, self.store_param_remainders = store_params, store_param_remainders
        self.alignment = 128 // 4
        shard = int(1024 * 1024 * bucket_cap_mb / 4 / self.distributed_size)
        self.default_shard_size = max(shard // self.alignment * self.alignment, self.alignment)
        self.state["buckets"], self.state["step"] = [], 0
        for parameter in self.parameters():
            root = dist.get_global_rank(self.process_group, 0)
            dist.broadcast(parameter.detach(), root, group=self.process_group)

    def parameters(self) -> list[Any]:
        """All parameters."""
        return [p for group in self.param_groups for p in group["params"]]

    def parameter(self, fragment: Any) -> Any:
        """The parameter that a fragment is of."""
        return self.param_groups[fragment.param_group_id]["params"][fragment.param_id]

    def init_params(self, params: Any = None) -> None:
        """Make the state of all parameters, or of these, that have none."""
        places = {
            parameter: (group_id, param_id)
            for group_id, group in enumerate(self.param_groups)
            for param_id, parameter in enumerate(group["params"])
        }
        for parameter in self.parameters() if params is None else params:
            if "fragments" not in self.state[parameter]:
                self._lay_out(parameter, *places[parameter])

    def _lay_out(self, parameter: Any, group_id: int, param_id: int) -> None:
        self.state[parameter]["fragments"] = []
        size, start = self.default_shard_size, 0
        while start < parameter.numel():
            number = len(self.state["buckets"]) - 1
            bucket = self.state["buckets"][number] if number >= 0 else None
            filled = -(-bucket.filled_size // self.alignment) * self.alignment if bucket else 0
            if bucket is None or filled >= bucket.bucket_size:
                self.state["buckets"].append(
                    SimpleNamespace(
                        bucket_size=size * self.distributed_size, shard_size=size, filled_size=0,
                        fragments=[], param_sync_dtype=self.param_sync_dtype,
                        params_shard=torch.zeros(size), exp_avg_shard=torch.zeros(size),
                        exp_avg_sq_shard=torch.zeros(size),
                    )
                )  # fmt: skip
                continue
            numel = min(parameter.numel() - start, bucket.bucket_size - filled)
            own = size * self.distributed_rank
            first = min(max(filled - own, 0), size)
            last = min(max(filled + numel - own, 0), size)
            at = first + own - filled + start
            is_own = first < last
            fragment = SimpleNamespace(
                param_group_id=group_id, param_id=param_id, bucket_id=number,
                param_range=(start, start + numel), bucket_range=(filled, filled + numel),
                in_local_shard=is_own, shard_range=(first, last) if is_own else None,
                shard_param_range=(at, at + last - first) if is_own else None,
            )  # fmt: skip
            self.state[parameter]["fragments"].append(fragment)
            bucket.fragments.append(fragment)
            if is_own:
                own_part = parameter.detach().view(-1)[at : at + last - first]
                bucket.params_shard[first:last].copy_(own_part)
            bucket.filled_size = filled + numel
            start += numel

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Reduce gradients, step the shards, gather the weights."""
        self.init_params()
        self.state["step"] += 1
        for bucket in self.state["buckets"]:
            gradients = torch.zeros(bucket.bucket_size)
            for fragment in bucket.fragments:
                gradient = self.parameter(fragment).grad
                if gradient is not None:
                    part = gradient.view(-1)[slice(*fragment.param_range)]
                    gradients[slice(*fragment.bucket_range)] += part
            dist.all_reduce(gradients, group=self.process_group)
            if self.average_grad_sync:
                gradients /= self.process_group_size
            self._step_shard(bucket, gradients.split(bucket.shard_size)[self.distributed_rank])
            own = bucket.params_shard.to(bucket.param_sync_dtype)
            whole = own.new_empty(bucket.bucket_size)
            parts = list(whole.split(bucket.shard_size))
            dist.all_gather(parts, own, group=self.distributed_process_group)
            for fragment in bucket.fragments:
                weights = self.parameter(fragment).view(-1)[slice(*fragment.param_range)]
                weights.copy_(whole[slice(*fragment.bucket_range)])

    def _step_shard(self, bucket: Any, gradients: Tensor) -> None:
        for fragment in bucket.fragments:
            if fragment.in_local_shard:
                own = slice(*fragment.shard_range)
                moments = {n: getattr(bucket, f"{n}_shard")[own] for n in ("exp_avg", "exp_avg_sq")}
                group = self.param_groups[fragment.param_group_id]
                settings = {**group, "step": self.state["step"]}
                adamw(bucket.params_shard[own], gradients[own], moments, settings)

    def state_dict(self) -> Any:
        """Whole tensors, on every rank."""
        self.init_params()
        found: dict[Any, Any] = {"step": self.state["step"]}
        for index, parameter in enumerate(self.parameters()):
            for name, shard in _KEPT.items():
                whole = torch.zeros(parameter.numel())
                for fragment in self.state[parameter]["fragments"]:
                    bucket = self.state["buckets"][fragment.bucket_id]
                    parts = [torch.zeros(bucket.shard_size) for _ in range(self.distributed_size)]
                    own = getattr(bucket, shard)
                    dist.all_gather(parts, own, group=self.distributed_process_group)
                    row = torch.cat(parts)[slice(*fragment.bucket_range)]
                    whole[slice(*fragment.param_range)] = row
                found.setdefault(index, {})[name] = whole.view(parameter.shape)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": found, "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy in place what lies in this rank's shards."""
        self.init_params()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
        self.state["step"] = state_dict["state"]["step"]
        for index, parameter in enumerate(self.parameters()):
            for fragment in self.state[parameter]["fragments"]:
                for name, shard in _KEPT.items() if fragment.in_local_shard else ():
                    held = getattr(self.state["buckets"][fragment.bucket_id], shard)
                    row = state_dict["state"][index][name].view(-1)
                    held[slice(*fragment.shard_range)] = row[slice(*fragment.shard_param_range)]


_KEPT = {"param": "params_shard", "exp_avg": "exp_avg_shard", "exp_avg_sq": "exp_avg_sq_shard"}
DistributedFusedAdam.__module__ = _CLASS


def of_tree(tree: Path) -> Any:
    """Return the class of a tree of apex, on CPUs: beside `megatron_on_cpu.install()`."""
    if _CLASS not in sys.modules:
        for name in ("apex", "apex.contrib", "apex.contrib.optimizers"):  # which import kernels
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(tree.joinpath(*name.split(".")))]
        norms, steps = ModuleType("amp_C"), ModuleType("distributed_adam_cuda")
        norms.multi_tensor_l2norm = _l2norm  # type: ignore[attr-defined]
        steps.multi_tensor_fused_adam = _fused_adam  # type: ignore[attr-defined]
        sys.modules |= {"amp_C": norms, "distributed_adam_cuda": steps}
        module: Any = importlib.import_module(_CLASS)
        module._coalescing_manager = _one_by_one  # which gloo does not know
        module._coalescing_manager_append_work = Works.append
    return sys.modules[_CLASS].DistributedFusedAdam


class Works(list[Any]):
    """Collectives under way."""

    def wait(self) -> None:
        """Wait for all."""
        for work in self:
            work.wait()


@contextlib.contextmanager
def _one_by_one(group: Any, device: Any, async_ops: bool = False) -> Iterator[Works]:
    yield Works()


def _l2norm(chunk: int, overflow: Tensor, lists: Any, per_tensor: bool) -> Any:
    return torch.stack([t.float().norm() for t in lists[0]]).norm().view(1), None


def _fused_adam(
    chunk: int, overflow: Tensor, lists: Any, scale: Tensor, rate: float, first: float,
    second: float, epsilon: float, step: int, mode: int, is_corrected: int, decay: float,
) -> None:  # fmt: skip
    """Step as its kernel does with decoupled decay and corrected moments; write weights out."""
    assert mode == 1 and is_corrected == 1
    group = {"betas": (first, second), "lr": rate, "eps": epsilon, "weight_decay": decay}
    for value, exp_avg, exp_avg_sq, gradient, out in zip(*lists, strict=True):
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        adamw(value, gradient.float() * scale, moments, {**group, "step": step})
        out.copy_(value)
