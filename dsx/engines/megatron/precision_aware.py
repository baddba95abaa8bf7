"""Masters inside Transformer Engine's FusedAdam (`--use-precision-aware-optimizer`).

Megatron's distributed optimizer then hands it this rank's ranges of the 16-bit weights themselves.
The masters are in its state, `master_param`: fp32, or, of bf16 weights from Transformer Engine 2.1
on, the 16 bits that a weight lacks (`store_param_remainders`), which are signed: a weight is its
master rounded to nearest, a tie upwards, so that a negative remainder stands below a weight that
was rounded up. What is read and written here are the fp32 numbers of both, exactly.

A load puts other tensors into the state: it is looked into at every access.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsx.engines.masters import Piece
from dsx.engines.masters_apart import ApartPiece, engines_master


@dataclass(frozen=True)
class RemainderPiece(Piece):
    """What of a parameter is here as a bf16 weight, `master`, and what it lacks of fp32."""

    find: Callable[[], Tensor] | None = None

    @property
    def is_live(self) -> bool:
        """No: they are put together."""
        return False

    def view(self) -> Tensor:
        """Return the fp32 elements `[numel]`, a copy."""
        weights, remainders = (part.to(torch.int32) for part in self._halves())
        return ((weights << 16) + remainders).view(torch.float32)

    def overwrite(self, values: Tensor) -> None:
        """Write weights and remainders of fp32 elements `[numel]`, in place."""
        weights, remainders = self._halves()
        bits = values.detach().to(weights.device).contiguous().view(torch.int32)
        rounded = (bits + 0x8000) >> 16
        weights.copy_(rounded.to(torch.int16))
        remainders.copy_((bits - (rounded << 16)).to(torch.int16))

    def _halves(self) -> tuple[Tensor, Tensor]:
        assert self.find is not None, "made by piece_of"
        part = slice(self.offset, self.offset + self.numel)
        return self.flat().view(torch.int16)[part], self.find().view(-1)[part]


def is_inside(leaf: Any) -> bool:
    """Whether an optimizer of Megatron leaves its masters to the one inside it."""
    config: Any = getattr(leaf, "config", None)
    name = "use_precision_aware_optimizer"  # with fp8 recipes but one Megatron keeps them itself
    return bool(getattr(config, f"{name}_no_fp8_or_ds_fp8", getattr(config, name, False)))


def piece_of(optimizer: Any, weights: Tensor, shape: tuple[int, ...], start: int) -> Piece:
    """Return a range of a parameter, whose 16-bit `weights` this optimizer steps.

    An fp32 weight is its own master: what is in the state beside it nobody steps.
    """
    if weights.dtype == torch.float32:
        return Piece(weights, shape, start)
    has_remainders = weights.dtype == torch.bfloat16 and getattr(
        optimizer, "store_param_remainders", False
    )

    def find() -> Tensor:
        return engines_master(optimizer, weights, has_remainders)

    kind = RemainderPiece if has_remainders else ApartPiece
    return kind(weights, shape, start, find=find)
