"""The contract of a wire format: what it is, and the codec that runs it.

A `Wire` is a choice (a frozen dataclass, usable as configuration); the `Codec` it makes owns work
space for one device and turns fp32 vectors into messages and back. A message is self-contained
up to its length: whoever decodes it knows the format and the number of elements.

Invariants: a decoded value is a grid's number times a scale with at most one rounding, so every
platform and all kernels decode the same bits. Encoders may differ from one platform to the next; of
one platform they do not, whatever the kernels. Non-finite input must be refused by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # what only plans is started without torch
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from dsx.core.buffers import Buffers

TILE = 2**17  # elements that kernels work on at a time, where they are not compiled
Kernels = Literal["auto", "native", "compiled", "eager"]
Rounding = Literal["nearest", "stochastic"]


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

    def work(self, numel: int, kernels: Kernels = "auto") -> Mapping[str, int]:
        """Return the bytes of what a codec for `numel` elements works in, by role, on the CPU.

        With the kernels that it would have on this machine: native ones work in nothing.
        """
        ...

    def codec(
        self,
        numel: int,
        device: torch.device,
        kernels: Kernels = "auto",
        buffers: Buffers | None = None,
    ) -> Codec:
        """Return a codec for vectors of up to `numel` elements on `device`.

        It works in `buffers`, with all others that the same thread uses. Raises RuntimeError if
        `kernels` is "native" or "compiled" and those cannot be had here.
        """
        ...


class Codec(Protocol):
    """Encodes and decodes in its own work space; allocates nothing after its first call.

    Vectors are contiguous fp32 `[n]`, n <= numel; messages contiguous uint8 `[num_bytes(n)]` at
    any address. ValueError if a message and its vector disagree in size.
    """

    @property
    def kernels(self) -> str:
        """What runs: "native", "compiled" or "eager"."""
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
