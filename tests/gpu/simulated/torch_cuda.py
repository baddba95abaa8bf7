"""`torch.cuda` for the simulated accelerator: what a build of torch without CUDA leaves out.

Only what is asked for by what runs here; anything else fails as it does without CUDA.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
from torch import Tensor

from tests.gpu.simulated import notes

_library: Any = ctypes.CDLL(None)  # loaded by `__main__`, with its names for all
_CUDA = 1  # torch's number of the kind of device


def install() -> None:
    """Put what is here in the place of `torch.cuda`'s own."""
    notes.listen(_library)
    cuda: Any = torch.cuda
    _devices(cuda)
    _streams(cuda)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.manual_seed_all = lambda seed: None
    cuda.cudart = Driver
    cuda.is_bf16_supported = lambda *asked, **options: True
    Tensor.__deepcopy__ = _deepcopied(Tensor.__deepcopy__)
    torch.nn.Parameter.__deepcopy__ = _deepcopied(torch.nn.Parameter.__deepcopy__)


def _devices(cuda: Any) -> None:
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    # torch keeps these in sets, where functions of ctypes cannot be
    cuda.device_count = lambda: _library.simulated_num_devices()
    cuda.current_device = lambda: _library.simulated_device()
    cuda.set_device = _set_device
    cuda.device = OnDevice
    cuda.synchronize = lambda device=None: torch._C._accelerator_synchronizeDevice(_index(device))


def _streams(cuda: Any) -> None:
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, OnStream
    cuda.current_stream = _current_stream
    cuda.set_stream = torch._C._accelerator_setStream
    cuda.default_stream = lambda device=None: _stream(0, _index(device))


def _index(device: Any) -> int:
    """Return a device's number; the current one's where none is said."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return _library.simulated_device() if index is None else index


def _set_device(device: Any) -> None:
    notes.note_if_elsewhere(_index(device), "a thread's device")
    _library.simulated_set_device(_index(device))


class OnDevice:
    """`torch.cuda.device`; going back makes no context, nor does it there."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self._before = _library.simulated_device()
        _library.simulated_set_device(self.index)

    def __exit__(self, *failure: object) -> None:
        _library.simulated_set_device(self._before)


class Stream(torch.Stream):
    """`torch.cuda.Stream`, of which the simulated accelerator has no priorities."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=0)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """`torch.cuda.Event`, of the current device until it is recorded."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Any:
        device = torch.device("cuda", _library.simulated_device())
        return super().__new__(cls, device=device, enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        self._given_at = time.perf_counter()
        super().record(stream or _current_stream())

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds between the two as they were given to streams: none has a clock."""
        return 1000.0 * (end_event._given_at - self._given_at)

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or _current_stream())


def _stream(stream_id: int, index: int) -> Any:
    return Stream(stream_id=stream_id, device_index=index, device_type=_CUDA)


def _current_stream(device: Any = None) -> Any:
    stream = torch._C._accelerator_getStream(_index(device))
    return _stream(stream.stream_id, stream.device_index)


class OnStream:
    """`torch.cuda.stream`, which selects the thread's device before again, as torch's does."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = _library.simulated_device()
        self._before = _current_stream(self._device)
        self._there = _current_stream(self.stream.device_index)
        torch._C._accelerator_setStream(self.stream)
        _library.simulated_set_device(self.stream.device_index)

    def __exit__(self, *failure: object) -> None:
        if self.stream is None:
            return
        torch._C._accelerator_setStream(self._there)
        notes.note_if_elsewhere(self._device, "the end of a stream's block")
        torch._C._accelerator_setStream(self._before)
        _library.simulated_set_device(self._device)


class Driver:
    """`torch.cuda.cudart()`: memory of the host that is page-locked from here on."""

    class cudaError:  # noqa: N801
        success = 0

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        _library.simulated_register(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        _library.simulated_unregister(ctypes.c_void_p(start))
        return 0


def _deepcopied(of_torch: Any) -> Any:
    """Return `copy.deepcopy` of a tensor: torch's own makes a storage, which it cannot there."""

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not tensor.is_cuda:
            return of_torch(tensor, memo)
        if id(tensor) not in memo:
            copied = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, tensor.requires_grad)
            memo[id(tensor)] = copied
        return memo[id(tensor)]

    return deepcopy
