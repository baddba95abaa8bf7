"""How the weights of a Hugging Face model and those of Megatron are made of each other.

One table serves both directions: a `Match` is a weight of Megatron and those that it holds under
Hugging Face's names. Megatron has queries, keys and values in one matrix, group by group: the
queries of a group, its key, its value. SwiGLU's gate and up projection lie in one matrix, too, the
gate first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsx.engines.megatron_model.notes import ModelNotes

Table = Mapping[str, tuple[int, ...]]  # shapes by Hugging Face's name


def _first(parts: Sequence[Tensor]) -> Tensor:
    (part,) = parts
    return part


@dataclass(frozen=True)
class Match:
    """One weight of Megatron, and those of Hugging Face that lie in it, in order.

    `split` makes these of the whole weight, `join` the whole of these.
    """

    source: str
    targets: Table
    split: Callable[[Tensor], Sequence[Tensor]] = lambda whole: [whole]
    join: Callable[[Sequence[Tensor]], Tensor] = _first


@dataclass(frozen=True)
class Part:
    """One weight of Hugging Face: its shape, the match that it is of, and where in that."""

    shape: tuple[int, ...]
    match: Match
    index: int


def parts_of(matches: Sequence[Match]) -> dict[str, Part]:
    """Return the weights of Hugging Face by name, in order."""
    found: dict[str, Part] = {}
    for match in matches:
        for index, (name, shape) in enumerate(match.targets.items()):
            found[name] = Part(shape, match, index)
    return found


@dataclass(frozen=True)
class Sizes:
    """A model's sizes. `norm_offset` is added to the gains of norms, which may lie around zero.

    `rows` of the vocabulary are trained, `vocab` of these in use.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocab: int
    rows: int
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
            notes.rows,
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

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return queries, keys and values, [rows, ...] each, of the matrix or vector of all."""
        of_group = self.queries // self.groups
        grouped = whole.view(self.groups, of_group + 2 * self.head, *whole.shape[1:])
        parts = grouped.split([of_group, self.head, self.head], dim=1)
        return [part.flatten(0, 1) for part in parts]

    def interleave(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the matrix or vector of all, of queries, keys and values."""
        grouped = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def table(self, source: str, target: str) -> Match:
        """Return an embedding or a head, without the rows that are not in use.

        In the other direction those are zeros.
        """
        shape = (self.vocab, self.hidden)

        def padded(parts: Sequence[Tensor]) -> Tensor:
            table = _first(parts)
            return torch.cat([table, table.new_zeros(self.rows - len(table), self.hidden)])

        return Match(source, {target: shape}, lambda whole: [whole[: self.vocab]], padded)

    def gain(self, source: str, target: str, numel: int | None = None) -> Match:
        """Return the gain of a norm, over the hidden dimension or over `numel` elements."""
        targets = {target: (numel or self.hidden,)}
        offset = self.norm_offset
        if not offset:
            return Match(source, targets)
        return Match(
            source, targets, lambda whole: [whole + offset], lambda parts: _first(parts) - offset
        )


def gated(source: str, gate: str, up: str, ffn: int, hidden: int) -> Match:
    """Return SwiGLU's two projections, [ffn, hidden] each, of the matrix that holds both."""
    return Match(
        source,
        {gate: (ffn, hidden), up: (ffn, hidden)},
        lambda whole: whole.chunk(2),
        lambda parts: torch.cat(list(parts)),
    )


def norm_name(held: Collection[str], apart: str, inside: str, what: str) -> str:
    """Return the name of a norm's `what` (weight or bias).

    It is a module of its own, `apart`, or, with Transformer Engine, within the linear one behind
    it, `inside`.
    """
    fused = f"{inside}.layer_norm_{what}"
    return fused if fused in held else f"{apart}.{what}"
