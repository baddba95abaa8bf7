"""What an optimizer, a schedule and a model are set to, as plain values that clusters compare.

Read from the objects themselves, so that defaults are in it and what a script has changed. What
differs only in how fast a step is (kernels) is left out. Of modules that are torch's own all public
numbers are read, of others those with a fraction: an epsilon, a dropout, a scale; their whole
numbers may be of the machine (a device, a rank), and so may those of torch's wrappers (DDP).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

_KERNELS = ("fused", "foreach", "capturable", "differentiable")


def settings_of_optimizers(optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return each setting of the parameter groups, as a list over all groups of all optimizers."""
    groups = [
        {"type": type(optimizer).__name__, **plain(group)}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    keys = dict.fromkeys(key for group in groups for key in group if key not in _KERNELS)
    return {key: [group.get(key) for group in groups] for key in keys}


def settings_of_schedule(schedule: Any) -> dict[str, Any]:
    """Return the type and the public attributes of a learning rate schedule; nothing of None."""
    if schedule is None:
        return {}
    return {"type": type(schedule).__name__, **plain(vars(schedule))}


def settings_of_modules(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Return the numbers that modules compute with, by their names."""
    found: dict[str, Any] = {}
    for name, module in modules:
        is_torch = type(module).__module__.startswith("torch.nn.modules")
        values = plain(vars(module), (bool, int, float) if is_torch else (float,))
        values.pop("training", None)
        if values:
            found[name] = values
    return found


def plain(
    named: Mapping[str, Any], kinds: tuple[type, ...] = (bool, int, float, str, type(None))
) -> dict[str, Any]:
    """Return the public entries that are of these kinds, or lists of them; tensors as numbers."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, torch.dtype):
            value = str(value)
        if isinstance(value, (list, tuple)):
            value = list(cast("Sequence[Any]", value))
        entries = cast("list[Any]", value if isinstance(value, list) else [value])
        if not name.startswith("_") and entries and all(type(e) in kinds for e in entries):
            found[name] = value
    return found
