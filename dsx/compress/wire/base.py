"""The contract of a wire format, and the memory that a codec works in.

A `Wire` is a choice (a frozen dataclass, usable as configuration); the `Codec` it makes owns work
space for one device and turns fp32 vectors into messages and back. A message is self-contained
up to its length: whoever decodes it knows the format and the number of elements.

Invariants: a decoded value is `float(code) * scale` with at most one rounding, so every platform
and every backend decodes the same bits. Encoders may differ from one platform to the next; of one
platform they do not, compiled or eager. Non-finite input must be refused by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

Kernels = Literal["auto", "compiled", "eager"]
Rounding = Literal["nearest", "stochastic"]

# Work space: a tensor of this role, shape and dtype, contents undefined. Eager kernels get the
# same memory for the same role each time; compiled ones a fresh tensor that never materialises.
Scratch = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


class Wire(Protocol):
    """How fp32 values travel; the number of bytes depends on the number of elements alone."""

    @property
    def name(self) -> str:
        """The format's name in configurations and tables, e.g. "int4"."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether every fp32 value arrives unchanged."""
        ...

    @property
    def granularity(self) -> int:
        """Elements that stay together: a vector may be cut at multiples of it at no cost."""
        ...

    def validate(self) -> None:
        """Raise ValueError for a value outside the format's range."""
        ...

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message of `numel` >= 0 elements."""
        ...

    def codec(self, numel: int, device: torch.device, kernels: Kernels = "auto") -> Codec:
        """Return a codec for vectors of up to `numel` elements on `device`.

        Raises RuntimeError if `kernels` is "compiled" and kernels cannot be compiled here.
        """
        ...


class Codec(Protocol):
    """Encodes and decodes in its own work space; allocates nothing after its first call.

    Vectors are contiguous fp32 `[n]`, n <= numel; messages contiguous uint8 `[num_bytes(n)]` at
    any address. ValueError if a message and its vector disagree in size.
    """

    @property
    def backend(self) -> str:
        """What runs: "compiled" or "eager"."""
        ...

    def encode(self, x: Tensor, out: Tensor, seed: int = 0) -> None:
        """Write the message of `x` to `out`; `seed` picks the noise of stochastic rounding."""
        ...

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of message `data` to `out`."""
        ...

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of message `data` to `out`: a decode, then a separate addition."""
        ...

    def encode_with_feedback(self, x: Tensor, residual: Tensor, out: Tensor, seed: int = 0) -> None:
        """Add `residual` to `x`, write its message to `out`, keep the error in `residual`.

        In place of both: afterwards `decoded + residual == x`, all fp32 `[n]`.
        """
        ...


class Buffers:
    """The eager kernels' work space: one buffer per role, as large as was ever asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer of `role`, cut to `shape`; a role keeps one dtype."""
        numel = 1
        for size in shape:
            numel *= size
        buffer = self._buffers.get(role)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._buffers[role] = buffer
        return buffer[:numel].view(shape)


def require_sizes(x: Tensor, data: Tensor, numel: int, num_bytes: int) -> None:
    """Raise ValueError unless `x` fits a codec of `numel` and `data` is its message."""
    if x.numel() > numel:
        raise ValueError(
            f"a vector of {x.numel()} elements is longer than the codec's numel={numel}; "
            "make the codec for the longest vector"
        )
    if data.numel() != num_bytes:
        raise ValueError(
            f"a message of {data.numel()} bytes does not hold {x.numel()} elements, which take "
            f"{num_bytes}; cut the buffer to num_bytes(numel)"
        )
