"""Kernels through torch.compile: C++ loops on the CPU, Triton on a GPU.

Compilation happens on the first call of each operation, for one fixed slice shape, and takes from
seconds to a minute. It needs a C++ compiler (CPU) or Triton (GPU) at run time; `unavailable`
finds out by compiling a trivial function, once per kind of device.

Bits: contraction of products and sums is off in both compilers and division is IEEE's (on a GPU,
where this torch has the option), so the compiled kernels return what the eager ones do.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

_OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "emulate_precision_casts": True,  # for Triton this also turns the fusion of mul and add off
    "eager_numerics.division_rounding": True,
}


def compile_kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` compiled for the shapes of its first call; it must not close over tensors.

    Each kernel gets its own code object: Dynamo keeps its cache, and a limit of 8 entries, by code,
    and all formats share one source.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} must be a plain function")
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    known = torch._inductor.list_options()  # pyright: ignore[reportPrivateUsage]
    options = {key: value for key, value in _OPTIONS.items() if key in known}
    return torch.compile(own, dynamic=False, fullgraph=True, options=options)


@functools.cache
def unavailable(device_type: str) -> str | None:
    """Return why nothing can be compiled for `device_type` here, or None; asked once."""
    config: Any = importlib.import_module("torch._inductor.config")
    # torch 2.6, whose kernels came to other bits than the eager ones in tests
    if isinstance(config.cpp.enable_floating_point_contract_flag, bool):
        return f"torch {torch.__version__} compiles sums and products to other bits"
    x = torch.zeros(64, device=device_type)
    try:
        compile_kernel(_probe)(x)
    except (RuntimeError, OSError, ImportError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None


def _probe(x: torch.Tensor) -> None:
    x.add_(1)
