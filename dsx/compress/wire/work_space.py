"""The memory that a codec works in, and what every codec checks of the vectors it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Work space: a tensor of this role, shape and dtype, contents undefined. Eager kernels get the
# same memory for the same role each time; compiled ones a fresh tensor that never materialises.
Scratch = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


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
