"""fp32 masters of apex's DistributedFusedAdam, which parts them among a cluster's ranks itself.

It lays parameters one after another into buckets, of each of which every rank of its
`distributed_process_group` has an equal shard of fp32 masters and moments
(`apex/contrib/optimizers/distributed_fused_adam.py` of July 2026: `state["buckets"]`, and in
`state[p]["fragments"]` where a parameter lies). So what dsx reads and writes on a rank are its
shards. A parameter that the end of a bucket cuts lies in several: to dsx each part is a parameter
of its own, `<name>.bucket_<number>`. Weights are gathered behind an outer step as the optimizer
gathers them behind its own: whole buckets, in its `param_sync_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dsx.core.types import ParameterShape
from dsx.core.waits import waiting_for
from dsx.engines.data_parallel import Placement, require_whole_cluster, sharded_modules
from dsx.engines.masters import Piece, dtype_name
from dsx.engines.masters_apart import ApartMasters, ApartPiece, is_of_apex

KIND = "DistributedFusedAdam"
_ELSEWHERE = "use apex.optimizers.FusedAdam under DistributedDataParallel, or ZeRO-1 of DeepSpeed"


class DistributedMasters(ApartMasters):
    """The shards of this rank; making it initializes the optimizers' states, where none are yet.

    ValueError for what is not served.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> None:
        super().__init__(parameters, ())
        self._optimizers = optimizers
        self._named: dict[str, tuple[nn.Parameter, Any]] = {}
        self._shapes: list[ParameterShape] = []
        self._wholes: dict[str, str] = {}
        self.pieces: dict[str, Piece] = {}
        self._owners: dict[int, Any] = {}  # optimizers, by the id of a parameter
        held: dict[int, Any] = {}
        for optimizer in optimizers:
            _require_served(optimizer)
            lay_out(optimizer)
            held |= {id(p): optimizer for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in parameters.items():
            self._owners[id(parameter)] = held[id(parameter)]
            self._named[name] = parameter, held[id(parameter)]
            self._take(name)

    def __bool__(self) -> bool:
        """Whether any parameter has a master; all do."""
        return bool(self._named)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has a master apart from it."""
        return id(parameter) in self._owners

    def shapes(self, parameters: Mapping[str, nn.Parameter]) -> list[ParameterShape]:
        """Return what dsx takes for parameters, parts of the model's own among them."""
        return self._shapes

    def whole_of(self, name: str) -> str:
        """Return the name of the model's parameter that a part is of."""
        return self._wholes[name]

    def write_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gather the weights of all buckets that hold these parameters. Collective."""
        for optimizer in self._optimizers:
            own = [p for p in parameters if self._owners.get(id(p)) is optimizer]
            numbers = {part.bucket_id for p in own for part in _parts(optimizer, p)}
            for number in sorted(numbers):
                _gather(optimizer, number)

    def _rounded(self) -> Iterator[tuple[str, nn.Parameter, Tensor, list[Tensor]]]:
        for name, (parameter, optimizer) in self._named.items():
            weights = parameter.detach().view(-1)
            for part in _parts(optimizer, parameter):
                if part.in_local_shard:
                    master = _shard(optimizer, part.bucket_id)[slice(*part.shard_range)]
                    sent = master.to(optimizer.state["buckets"][part.bucket_id].param_sync_dtype)
                    rounded = [one.to(parameter.dtype) for one in (master, sent)]
                    yield name, parameter, weights[slice(*part.shard_param_range)], rounded

    def _take(self, name: str) -> None:
        """Note in which buckets a parameter lies, and what of it is in this rank's shards."""
        parameter, optimizer = self._named[name]
        parts = _parts(optimizer, parameter)
        for part in parts:
            first, last = part.param_range
            own, shape = name, tuple(parameter.shape)
            if len(parts) > 1:
                own, shape = f"{name}.bucket_{part.bucket_id}", (last - first,)
            self._wholes[own] = name
            self._shapes.append(ParameterShape(own, shape, dtype_name(parameter)))
            if part.in_local_shard:
                begin, end = part.shard_param_range
                shape = shape if end - begin == last - first else (end - begin,)
                find = partial(_shard, optimizer, part.bucket_id)
                at = begin - first, part.shard_range[0]
                self.pieces[own] = ApartPiece(parameter, shape, *at, find=find)


def lay_out(optimizer: Any) -> None:
    """Put what has no place in buckets yet there: last parameters first, as their gradients come.

    The optimizer by itself does so as they come in its first backward.
    """
    optimizer.init_params(list(optimizer.parameters())[::-1])


def is_distributed(optimizers: Sequence[Optimizer]) -> bool:
    """Whether these are apex's DistributedFusedAdam; ValueError where only some are."""
    found = [is_of_apex(optimizer, KIND) for optimizer in optimizers]
    if any(found) and not all(found):
        others = {
            type(o).__name__ for o, is_one in zip(optimizers, found, strict=True) if not is_one
        }
        raise ValueError(
            f"apex's {KIND} beside {', '.join(sorted(others))}, which keeps no gradients equal "
            f"between ranks: give all parameters to {KIND}, or {_ELSEWHERE}"
        )
    return any(found)


def find_masters_apart(
    parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> ApartMasters:
    """Return the masters of parameters that are not their own; ValueError if not served."""
    kind = DistributedMasters if is_distributed(optimizers) else ApartMasters
    return kind(parameters, optimizers)


def placement_of(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    num_ranks: int,
) -> Placement | None:
    """Return how DistributedFusedAdam places a model over this cluster's ranks; None without it."""
    if not is_distributed(optimizers):
        return None
    wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    if wrapped or sharded_modules(model):
        raise ValueError(
            f"apex's {KIND} reduces gradients itself: attach the bare model, or {_ELSEWHERE}"
        )
    groups: list[Any] = []
    for optimizer in optimizers:
        held: Any = optimizer
        require_whole_cluster(held.process_group_size, num_ranks)
        groups.append(held.redundant_process_group if held.redundant_size > 1 else None)
    pieces = DistributedMasters(parameters, optimizers).pieces
    if any(group is not groups[0] for group in groups):
        raise ValueError(
            f"several {KIND} with redundant_process_group of their own: give all of them one"
        )
    return Placement(KIND, pieces, groups[0])


def _require_served(optimizer: Any) -> None:
    """Raise ValueError for masters that are not fp32 shards, or weights gathered in a forward."""
    kept = getattr(optimizer, "dtype", torch.float32)
    advice = "leave it out"
    refused: dict[str, str] = {}
    if kept != torch.float32:
        refused[f"dtype={kept}"] = "its masters have to be fp32; leave it out"
    for name in ("store_param_remainders", "with_scaled_states", "overlap_param_sync"):
        if getattr(optimizer, name, False):
            refused[f"{name}=True"] = advice
    if not optimizer.store_params:
        refused["store_params=False"] = "masters are its copies of parameters; leave it out"
    if not optimizer.param_sync_dtype.is_floating_point:
        refused[f"param_sync_dtype={optimizer.param_sync_dtype}"] = "use a floating-point type"
    for setting, why in refused.items():
        raise ValueError(f"dsx does not serve {setting} of apex's {KIND}: {why}")


def _parts(optimizer: Any, parameter: nn.Parameter) -> list[Any]:
    """Return where a parameter lies, bucket by bucket."""
    parts = optimizer.state[parameter]["fragments"]
    return [part for part in parts if part.param_range[1] > part.param_range[0]]


def _shard(optimizer: Any, number: int) -> Tensor:
    """Return this rank's masters in a bucket; a state of an old form puts others in their place."""
    return optimizer.state["buckets"][number].params_shard


@torch.no_grad()
def _gather(optimizer: Any, number: int) -> None:
    """Write the weights of one bucket from all ranks' shards. Collective."""
    bucket = optimizer.state["buckets"][number]
    own = bucket.params_shard.to(bucket.param_sync_dtype)
    whole = own.new_empty(bucket.bucket_size)
    with waiting_for(f"the ranks of this cluster (weights of bucket {number})", None):
        dist.all_gather(
            list(whole.split(bucket.shard_size)), own, group=optimizer.distributed_process_group
        )
    for part in bucket.fragments:
        weights = optimizer.parameter(part).detach().view(-1)[slice(*part.param_range)]
        weights.copy_(whole[slice(*part.bucket_range)])
