"""Transformer Engine's own FusedAdam and tensors on the CPU, from its wheel of Python alone.

`transformer_engine-*-py3-none-any.whl` holds its classes in Python, and refuses to be imported
without the compiled `transformer_engine_torch`. Here stands an empty one in its place: names, the
types of elements, and one kernel of FusedAdam, written in torch.
"""

from __future__ import annotations

import enum
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.engines.fused import adamw

_ELEMENTS = "Byte Int32 Float32 Float16 BFloat16 Float8E4M3 Float8E5M2 Float4E2M1"
_PACKAGE, _COMPILED = "transformer_engine", "transformer_engine_torch"


class _Name(type):
    """A class in name only, whose attributes are, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, type.__new__(_Name, name, (), {}))
        return cls.__dict__[name]

    def __int__(cls) -> int:
        return 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls


class _Compiled(ModuleType):
    """What has been compiled, in name only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type.__new__(_Name, name, (), {})


def of_wheel(unpacked: Path) -> tuple[Any, Any]:
    """Return FusedAdam and QuantizedTensor of a wheel that has been unpacked."""
    if _COMPILED not in sys.modules:
        for name in (_PACKAGE, f"{_PACKAGE}.common", f"{_PACKAGE}.pytorch"):  # which load libraries
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(unpacked.joinpath(*name.split(".")))]
        common: Any = sys.modules[f"{_PACKAGE}.common"]
        common.decode_cudnn_version = None  # which is asked for where there is a device
        compiled: Any = _Compiled(_COMPILED)
        compiled.DType = enum.IntEnum("DType", [f"k{name}" for name in _ELEMENTS.split()], start=0)
        compiled.multi_tensor_adam = _fused_adam
        sys.modules[_COMPILED] = compiled
    module = importlib.import_module(f"{_PACKAGE}.pytorch.optimizers.fused_adam")
    return module.FusedAdam, module.QuantizedTensor


def _fused_adam(
    chunk: int, overflow: Any, lists: Any, rate: float, first: float, second: float,
    epsilon: float, step: int, mode: int, is_corrected: int, decay: float,
) -> None:  # fmt: skip
    """Step as its kernel does with decoupled decay: gradients, weights, moments and masters."""
    assert mode == 1 and is_corrected == 1
    group = {"betas": (first, second), "lr": rate, "eps": epsilon, "weight_decay": decay}
    gradients, weights, firsts, seconds, *masters = lists
    for index, weight in enumerate(weights):
        moments = {"exp_avg": firsts[index], "exp_avg_sq": seconds[index]}
        value = masters[0][index] if masters else weight.float()
        adamw(value, gradients[index].float(), moments, {**group, "step": step})
        if value is not weight:
            weight.copy_(value)
