"""Let megatron-core run where there is no GPU: for demonstrations and tests, on gloo.

megatron-core names CUDA devices and streams throughout. `install` maps them to the CPU, for this
process, before `megatron` is imported: allocations, `.cuda()`, `.to()`, streams, events, random
states, and the type names that its optimizers compare. Nothing that trains on GPUs uses it: of dsx
only `dsx bench chaos` does. What runs under it says nothing about streams, NCCL or speed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

ALLOCATIONS = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
]
NOTHING_TO_DO = [
    "empty_cache",
    "ipc_collect",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_stream",
    "synchronize",
]
SIZES = ["max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"]


class Stream:
    """A CUDA stream or event in name only: the CPU does one thing after another."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return 0."""
        return 0.0

    def record_event(self, *args: Any) -> Stream:
        """Return an event that has happened."""
        return Stream()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to record."""

    wait = wait_stream = wait_event = synchronize = record


def install() -> None:
    """Map CUDA to the CPU in this process; once, before `megatron` is imported."""
    if getattr(torch, "_is_megatron_on_cpu", False):
        return
    if "megatron.core.tensor_parallel" in sys.modules:
        raise RuntimeError("install() must come before megatron is imported")
    torch._is_megatron_on_cpu = True  # type: ignore[attr-defined]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", module="megatron")
    _map_tensors()
    _map_cuda()
    _map_random_states()
    _map_collectives()
    _map_meshes()


def _device(device: Any) -> Any:
    """Return the CPU for anything that means a CUDA device."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.startswith("cuda")
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if is_number or is_name or is_cuda else device


def _device_type(name: str) -> str:
    """Return the type of a device mesh, CPUs for CUDA."""
    return "cpu" if name == "cuda" else name


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its keyword `device` mapped, and without pinned memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        kwargs.pop("pin_memory", None)  # which needs a device to copy to
        return function(*args, **kwargs)

    return call


def _to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.to` or `Module.to` with any device mapped."""

    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = (torch.dtype, torch.Tensor, bool)
        args = tuple(a if isinstance(a, kept) else _device(a) for a in args)
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        return function(self, *args, **kwargs)

    return to


def _map_tensors() -> None:
    for name in ALLOCATIONS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor, module = torch.Tensor, torch.nn.Module
    for kind in (tensor, module):
        kind.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
        kind.to = _to_cpu(kind.to)  # type: ignore[method-assign]
    for name in ("new_empty", "new_zeros"):
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    type_of = tensor.type

    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)  # the optimizers compare with torch.cuda.*Tensor
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    tensor.type = cuda_type  # type: ignore[method-assign]


def _says(value: Any) -> Callable[..., Any]:
    """Return a function of anything; another one each time, as dynamo takes none of two names."""

    def say(*args: Any, **kwargs: Any) -> Any:
        return value

    return say


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _set_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _map_cuda() -> None:
    cuda: Any = torch.cuda
    stream = Stream()
    cuda.current_device, cuda.device_count = _says(0), _says(1)
    for name in NOTHING_TO_DO:
        setattr(cuda, name, _says(None))
    for name in SIZES:
        setattr(cuda, name, _says(0))
    cuda.Stream, cuda.Event = Stream, type("Event", (Stream,), {})
    cuda.stream = _says(contextlib.nullcontext())
    cuda.current_stream, cuda.default_stream = _says(stream), _says(stream)
    cuda.get_rng_state, cuda.set_rng_state = _get_state, _set_state
    cuda.manual_seed = _set_seed
    cuda.initial_seed = torch.initial_seed
    cuda.get_device_capability = _says((9, 0))
    cuda.get_device_name = _says("cpu")
    cuda.get_device_properties = _says(
        SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1, name="cpu")
    )
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _says(None), _says(None)


def _map_collectives() -> None:
    """Take what Megatron hands to collectives as it does where sizes have come from a device."""
    barrier, all_to_all_single = dist.barrier, dist.all_to_all_single

    def barrier_without_devices(
        group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> Any:
        return barrier(group=group, async_op=async_op)

    def all_to_all_of_lists(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = _listed(output_split_sizes), _listed(input_split_sizes)
        return all_to_all_single(output, input, *sizes, group=group, async_op=async_op)

    dist.barrier = barrier_without_devices
    dist.all_to_all_single = all_to_all_of_lists


def _map_meshes() -> None:
    """Let a mesh of CUDA devices be one of CPUs."""
    mesh: Any = DeviceMesh
    make, from_group = mesh.__init__, mesh.from_group

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, _device_type(device_type), *args, **kwargs)

    def from_groups(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return from_group(group, _device_type(device_type), *args, **kwargs)

    mesh.__init__, mesh.from_group = init, from_groups


def _listed(value: Any) -> Any:
    """Return a tensor's numbers as a list, anything else as it is."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _map_random_states() -> None:
    """Keep what tensor parallelism does with random states, on the CPU's generator."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # one generator is both here, and it would tell so for every weight
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state, random._set_cuda_rng_state = _get_state, _set_state
