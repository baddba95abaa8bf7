"""Model and optimizers of plain PyTorch as one state, in the layout of torch's `get_state_dict`.

`{"model": ..., "optimizer": {"state": {parameter: ...}, "param_groups": [...]}}`, by the model's
own names: a script without dsx loads it by `torch.distributed.checkpoint`. Shards of FSDP2 stay
shards, nothing is gathered. Torch's own function takes a step of an optimizer that has none behind
it, to see what it keeps; here what it keeps is read from the checkpoint, so nothing is stepped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsx.engines.data_parallel import bare_parameters

_STATE, _GROUPS = "state", "param_groups"
Named = Mapping[str, nn.Parameter]


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state; its tensors are the model's own, of this rank.

    ValueError for what an optimizer keeps that is not served, by its name.
    """
    named = bare_parameters(model)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        names, told = _names(optimizer, named), optimizer.state_dict()
        _require_known(type(optimizer).__name__, told, names, named)
        state |= {names[index]: kept for index, kept in told[_STATE].items()}
        for group in told[_GROUPS]:
            groups.append({**group, "params": [names[index] for index in group["params"]]})
    return {"model": get_model_state_dict(model), "optimizer": {_STATE: state, _GROUPS: groups}}


def place_for(model: nn.Module, metadata: Metadata) -> dict[str, Any]:
    """Return the places that a checkpoint is loaded into: the model's own tensors, and new ones.

    Of a parameter that is sharded now, what has its shape is sharded as it is.
    """
    own = {"model": get_model_state_dict(model)}
    return own | _places(metadata, bare_parameters(model), ("optimizer",))


def require_served(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError for what an optimizer keeps that is not served, by its name."""
    named = bare_parameters(model)
    names = _names(optimizer, named)
    _require_known(type(optimizer).__name__, optimizer.state_dict(), names, named)


def place_for_groups(metadata: Metadata) -> dict[str, Any]:
    """Return the places of the parameter groups alone, which are looked at before all else."""
    return _places(metadata, {}, ("optimizer", _GROUPS))


def _places(metadata: Metadata, named: Named, below: tuple[str, ...]) -> dict[str, Any]:
    """Return the places of what lies below a path."""
    found: dict[str, Any] = {}
    for key, path in (metadata.planner_data or {}).items():
        if tuple(path[: len(below)]) != below:
            continue
        entry = metadata.state_dict_metadata[key]
        value: Any = None
        if isinstance(entry, TensorStorageMetadata):
            owner = named.get(str(path[2])) if path[1] == _STATE else None
            value = _empty(entry, owner)
        _put(found, list(path), value)
    return found


def require_same_groups(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
) -> None:
    """Raise ValueError where a checkpoint's parameter groups are of other parameters."""
    named, groups = bare_parameters(model), _groups_in(state)
    kinds = [(type(o).__name__, group) for o in optimizers for group in o.param_groups]
    if len(groups) != len(kinds):
        raise ValueError(
            f"the checkpoint holds {len(groups)} parameter group(s), and this run's optimizers "
            f"{len(kinds)}: make them as they were made"
        )
    by_id = _by_id(named)
    for group, (kind, now) in zip(groups, kinds, strict=True):
        here = [by_id[id(p)] for p in now["params"]]
        if here != group["params"]:
            raise ValueError(
                f"a parameter group of {kind} holds "
                f"{_differing(here, group['params'])} in the one and not in the other, of "
                "this run and of the checkpoint: make the optimizers as they were made"
            )


def take(model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Give model and optimizers what was loaded, of groups that are the same."""
    set_model_state_dict(model, state["model"])
    named, groups = bare_parameters(model), _groups_in(state)
    kept: dict[str, Any] = state.get("optimizer", {}).get(_STATE, {})
    for optimizer in optimizers:
        names = _names(optimizer, named)
        own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
        indices = {name: index for index, name in names.items()}
        optimizer.load_state_dict(
            {
                _STATE: {i: kept[name] for name, i in indices.items() if name in kept},
                _GROUPS: [{**g, "params": [indices[n] for n in g["params"]]} for g in own],
            }
        )


def _groups_in(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(state.get("optimizer", {}).get(_GROUPS, []))


def _by_id(named: Named) -> dict[int, str]:
    return {id(p): name for name, p in named.items()}


def _names(optimizer: Optimizer, named: Named) -> dict[int, str]:
    """Return the names of what an optimizer holds, by the numbers of its `state_dict`."""
    by_id = _by_id(named)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {index: by_id[id(p)] for index, p in enumerate(held)}


def _require_known(
    kind: str, told: Mapping[str, Any], names: Mapping[int, str], named: Named
) -> None:
    """Raise ValueError for what torch.distributed.checkpoint would not bring back as it was."""
    advice = (
        "save it yourself in the place of TorchCheckpoints, with handle.save(directory) for the "
        "outer state"
    )
    if more := sorted(set(told) - {_STATE, _GROUPS}):
        raise ValueError(f"{kind}.state_dict() holds {', '.join(more)}, too: {advice}")
    for index, kept in told[_STATE].items():
        for key, value in kept.items() if isinstance(kept, Mapping) else [("", kept)]:
            if isinstance(value, Tensor) and (why := _not_served(value, named[names[index]])):
                raise ValueError(f"{kind} keeps {key} of {names[index]} as {why}: {advice}")


def _not_served(value: Tensor, parameter: nn.Parameter) -> str:
    """Say what a tensor is that is not torch's own of all ranks, nor sharded as its parameter."""
    own: Any = parameter
    if type(value) in (Tensor, nn.Parameter):
        is_of_rows = value.ndim > 0 and value.shape == _local_shape(own)
        if isinstance(parameter, DTensor) and (value.numel() > 1 or is_of_rows):
            return (
                f"a plain Tensor of {tuple(value.shape)}, which may be another on each rank, and "
                "the parameter as a DTensor (make it by zeros_like(p), not of p.to_local())"
            )
        return ""
    placements = getattr(value, "placements", None)
    is_as_parameter = placements is not None and placements == getattr(own, "placements", None)
    return "" if is_as_parameter else _kind_of(value)


def _local_shape(parameter: Any) -> Any:
    return parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape


def _kind_of(value: Any) -> str:
    placements = getattr(value, "placements", None)
    return type(value).__name__ + ("" if placements is None else f" placed as {placements}")


def _empty(entry: TensorStorageMetadata, parameter: Any) -> Tensor:
    """Return a place for a tensor: as its parameter lies, where it has its shape."""
    dtype = entry.properties.dtype
    if parameter is not None and parameter.shape == entry.size:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _put(target: Any, path: list[Any], value: Any) -> None:
    """Set what lies at a path of keys and places of lists, and make what leads there."""
    for here, following in zip(path, path[1:], strict=False):
        new: Any = [] if isinstance(following, int) else {}
        if isinstance(target, list):
            target.extend([None] * (here + 1 - len(target)))
            target[here] = new if target[here] is None else target[here]
            target = target[here]
        else:
            target = target.setdefault(here, new)
    if isinstance(target, list):
        target.extend([None] * (path[-1] + 1 - len(target)))
    target[path[-1]] = value


def _differing(ours: Sequence[str], theirs: Sequence[str]) -> str:
    found = sorted(set(ours) ^ set(theirs))
    return ", ".join(found[:4]) or "the same parameters in another order,"
