"""How a weight of a Hugging Face model is made of one of Megatron's.

Megatron has queries, keys and values in one matrix, group by group: the queries of a group, its
key, its value. SwiGLU's gate and up projection lie in one matrix, too, the gate first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsx.engines.megatron_model.notes import ModelNotes


@dataclass(frozen=True)
class Part:
    """One weight: its shape, Megatron's whole weight that it is of, and what is taken of that."""

    source: str
    shape: tuple[int, ...]
    take: Callable[[Tensor], Tensor] = lambda whole: whole


@dataclass(frozen=True)
class Sizes:
    """A model's sizes. `norm_offset` is added to the gains of norms, which may lie around zero."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocab: int
    norm_offset: float

    @classmethod
    def of(cls, notes: ModelNotes) -> Sizes:
        """Read them from notes."""
        given: Any = notes.transformer
        return cls(
            given["num_layers"],
            given["hidden_size"],
            given["ffn_hidden_size"],
            given["num_attention_heads"],
            given["num_query_groups"],
            given["kv_channels"],
            notes.vocab_size or notes.rows,
            1.0 if given.get("layernorm_zero_centered_gamma") else 0.0,
        )

    @property
    def queries(self) -> int:
        """Rows of all queries."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Rows of all keys, and of all values."""
        return self.groups * self.head

    def split(self, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [rows, ...] each, of the matrix or vector of all."""
        of_group = self.queries // self.groups
        grouped = whole.view(self.groups, of_group + 2 * self.head, *whole.shape[1:])
        parts = grouped.split([of_group, self.head, self.head], dim=1)
        query, key, value = (part.flatten(0, 1) for part in parts)
        return query, key, value

    def vocabulary(self, whole: Tensor) -> Tensor:
        """Return the rows that are in use."""
        return whole[: self.vocab]

    def gain(self, name: str) -> Part:
        """Return the gain of a norm over the hidden dimension."""
        return self.gain_of(name, self.hidden)

    def gain_of(self, name: str, numel: int) -> Part:
        """Return the gain of a norm over `numel` elements."""
        if not self.norm_offset:
            return Part(name, (numel,))
        return Part(name, (numel,), lambda whole: whole + self.norm_offset)


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return parts one below the other."""
    return torch.cat(list(parts))


def norm_name(held: Collection[str], apart: str, inside: str, what: str) -> str:
    """Return the name of a norm's `what` (weight or bias).

    It is a module of its own, `apart`, or, with Transformer Engine, within the linear one behind
    it, `inside`.
    """
    fused = f"{inside}.layer_norm_{what}"
    return fused if fused in held else f"{apart}.{what}"
