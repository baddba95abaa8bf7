"""Whole matrices from shards: a codec that needs them gets each on one rank of the cluster.

Under ZeRO a rank holds ragged ranges of flattened matrices, of which no factors can be made: a flat
range reshaped to some width has another spectrum. So before coding, the pieces of each split
matrix move to one rank of those that hold some of it, and the pieces of its mean move back: 4
bytes per element each way inside the cluster, once per sync. Factors, ranks and bits are then
those of the whole matrix, whatever the shards. What stays where it is (vectors, embeddings, whole
matrices) is not moved.

Both ways are collective over the ranks of the cluster, and every rank plans the same from all
ranks' layouts. Matrices are shared out so that the ranks' sums over all fragments come out alike.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dsx.core.buffers import Buffers
from dsx.core.engine import EngineAdapter
from dsx.core.types import Fragment, Slot
from dsx.method.fragments import in_a_row
from dsx.method.method import Method, SettingWarning

if TYPE_CHECKING:  # what only plans is started without torch
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)
AllToAll = Callable[[Sequence["Tensor"], Sequence["Tensor"]], None]


@dataclass(frozen=True)
class Move:
    """A piece of a matrix: where it lies on its home rank, and where on the matrix's rank."""

    home: int
    owner: int
    home_offset: int
    wire_offset: int
    numel: int


class MatrixGather:
    """One fragment of one rank: its layout on the wire, and the way there and back.

    Its buffers, on `device`, are made when they are first used; a plan has none.
    """

    def __init__(
        self,
        layouts: Sequence[Fragment],
        rank: int,
        owners: Mapping[str, int],
        device: torch.device | None,
    ) -> None:
        wires = [_wire_layout(layout, r, owners) for r, layout in enumerate(layouts)]
        own = layouts[rank]
        self.wire = Fragment(own.id, own.stage, wires[rank])
        self.is_needed = bool(owners)
        self._rank = rank
        self._kept = _kept(own, wires[rank])
        moves = [
            move for r, layout in enumerate(layouts) for move in _moves(r, layout, owners, wires)
        ]
        ranks = range(len(layouts))
        self._away = [[m for m in moves if m.home == rank and m.owner == r] for r in ranks]
        self._here = [[m for m in moves if m.owner == rank and m.home == r] for r in ranks]
        self.buffers = Buffers(device or "cpu")

    @property
    def buffer_bytes(self) -> int:
        """Return what pieces on their way take."""
        return sum(4 * m.numel for moves in (*self._away, *self._here) for m in moves)

    @cached_property
    def _sent(self) -> list[Tensor]:
        return self._buffers(self._away)

    @cached_property
    def _received(self) -> list[Tensor]:
        return self._buffers(self._here)

    def _buffers(self, moves: Sequence[Sequence[Move]]) -> list[Tensor]:
        return [self.buffers.zeros(sum(m.numel for m in ms)) for ms in moves]

    def to_wire(self, x: Tensor, out: Tensor, all_to_all: AllToAll) -> None:
        """Write the fragment as it travels to `out`; `x` `[numel]` is as the masters lie."""
        if not self.is_needed:
            out.copy_(x)
            return
        for moves, buffer in zip(self._away, self._sent, strict=True):
            _pack(x, [(m.home_offset, m.numel) for m in moves], buffer)
        all_to_all(self._sent, self._received)
        for offset, wire_offset, numel in self._kept:
            out[wire_offset : wire_offset + numel].copy_(x[offset : offset + numel])
        for moves, buffer in zip(self._here, self._received, strict=True):
            _unpack(buffer, [(m.wire_offset, m.numel) for m in moves], out)

    def from_wire(self, mean: Tensor, out: Tensor, all_to_all: AllToAll) -> None:
        """Write what came over the wire to `out` `[numel]`, as the masters lie.

        Without waiting for an accelerator: who writes to `mean` next waits for these copies.
        """
        if not self.is_needed:
            out.copy_(mean, non_blocking=True)
            return
        for moves, buffer in zip(self._here, self._received, strict=True):
            _pack(mean, [(m.wire_offset, m.numel) for m in moves], buffer)
        all_to_all(self._received, self._sent)
        for offset, wire_offset, numel in self._kept:
            own = mean[wire_offset : wire_offset + numel]
            out[offset : offset + numel].copy_(own, non_blocking=True)
        for moves, buffer in zip(self._away, self._sent, strict=True):
            _unpack(buffer, [(m.home_offset, m.numel) for m in moves], out)


def plan_matrix_gathers(method: Method, adapter: EngineAdapter) -> list[MatrixGather]:
    """Return one gather per fragment. Collective over the cluster's ranks."""
    layouts, rank = [adapter.fragments], 0
    if method.compression.needs_whole_matrices:
        layouts, rank = adapter.ranks.layouts(adapter.fragments)
    return plan_gathers(layouts, rank, method.compression.takes, adapter.device)


def fragments_sent(fragments: Sequence[Fragment], on_the_wire: Sequence[Fragment]) -> list[int]:
    """Return the numbers of those of which a rank has anything, as they lie or as they travel."""
    pairs = zip(fragments, on_the_wire, strict=True)
    return [own.id for own, wire in pairs if own.numel + wire.numel]


def factored(method: Method, adapter: EngineAdapter) -> list[tuple[list[str], list[str]]]:
    """Return, per fragment, the matrices that travel in factors and those that do not, by name.

    Of the whole model, so the same on every rank; vectors and small matrices are left out. Empty
    unless the codec makes factors.
    """
    if not method.compression.needs_whole_matrices:
        return []
    found: list[tuple[list[str], list[str]]] = []
    for parameters in adapter.fragment_parameters:
        slots = [Slot(p.name, p.shape, 0) for p in parameters]
        taken = [s.name for s in slots if method.compression.takes(s)]
        rest = [s.name for s in slots if not s.is_small and s.name not in taken]
        found.append((taken, rest))
    return found


def tell_what_is_factored(method: Method, adapter: EngineAdapter) -> None:
    """Log how a low-rank codec treats this model; warn if it finds nothing to factor."""
    fragments = factored(method, adapter)
    for index, (taken, rest) in enumerate(fragments):
        name = adapter.stage.name_of(index)
        others = f"; as codes: {', '.join(rest)}" if rest else ""
        logger.info("%s: %d matrices travel in factors%s", name, len(taken), others)
    if fragments and not any(taken for taken, _ in fragments):
        warnings.warn(
            "compression.type='low_rank' finds no matrix to factor in this model: all are too "
            "small to save compression.min_saving at this rank, or in compression.exclude, and "
            "travel in codes; lower compression.rank, or use type 'quantized'",
            SettingWarning,
            stacklevel=2,
        )


def plan_gathers(
    layouts: Sequence[Sequence[Fragment]],
    rank: int,
    takes: Callable[[Slot], bool],
    device: torch.device | None,
) -> list[MatrixGather]:
    """Return a rank's part in every fragment; `layouts` are all ranks' fragments."""
    owners, _ = share_out(layouts, takes)
    return [
        MatrixGather([fragments[index] for fragments in layouts], rank, of_fragment, device)
        for index, of_fragment in enumerate(owners)
    ]


def wires_of(
    layouts: Sequence[Sequence[Fragment]], takes: Callable[[Slot], bool]
) -> list[list[Fragment]]:
    """Return every rank's fragments as they travel; `layouts` are all ranks' as they lie."""
    owners, _ = share_out(layouts, takes)
    return [
        [
            Fragment(own.id, own.stage, _wire_layout(own, rank, of_fragment))
            for own, of_fragment in zip(layout, owners, strict=True)
        ]
        for rank, layout in enumerate(layouts)
    ]


def share_out(
    layouts: Sequence[Sequence[Fragment]], takes: Callable[[Slot], bool]
) -> tuple[list[dict[str, int]], list[int]]:
    """Return the rank of each split matrix by fragment, and each rank's elements on the wire."""
    load = [0] * len(layouts)
    owners = [
        _own([fragments[index] for fragments in layouts], takes, load)
        for index in range(len(layouts[0]))
    ]
    return owners, load


def _own(
    layouts: Sequence[Fragment], takes: Callable[[Slot], bool], load: list[int]
) -> dict[str, int]:
    """Return the rank of each split matrix that is wanted whole; adds to `load` in place.

    The largest first, to the rank that then has the least to keep and to be sent, with what it has
    of the fragments before: else the same ranks would own the largest of every fragment.
    """
    held: dict[str, dict[int, int]] = {}
    for rank, layout in enumerate(layouts):
        load[rank] += layout.numel
        for slot in layout.layout:
            if slot.numel and not slot.is_whole and takes(_whole(slot)):
                held.setdefault(slot.name, {})[rank] = slot.numel
                load[rank] -= slot.numel
    owners: dict[str, int] = {}
    for name in sorted(held, key=lambda n: (-sum(held[n].values()), n)):
        ranks, numel = held[name], sum(held[name].values())

        def cost(rank: int, numel: int = numel, ranks: dict[int, int] = ranks) -> int:
            moved = numel - ranks[rank]
            return load[rank] + numel + moved

        owners[name] = min(ranks, key=cost)
        load[owners[name]] += numel
    return owners


def _whole(slot: Slot) -> Slot:
    return replace(slot, shape=slot.whole, offset=0, start=0)


def _wire_layout(layout: Fragment, rank: int, owners: Mapping[str, int]) -> tuple[Slot, ...]:
    """Return what a rank sends: its slots, with split matrices whole where it is their rank."""
    slots = [
        _whole(slot) if slot.name in owners else slot
        for slot in layout.layout
        if owners.get(slot.name, rank) == rank
    ]
    return in_a_row(slots)


def _kept(own: Fragment, wire: Sequence[Slot]) -> list[tuple[int, int, int]]:
    """Return `(offset, offset on the wire, numel)` of what does not move."""
    places = {slot.name: slot for slot in wire}
    return [
        (s.offset, places[s.name].offset, s.numel)
        for s in own.layout
        if s.name in places and places[s.name].numel == s.numel
    ]


def _moves(
    rank: int, layout: Fragment, owners: Mapping[str, int], wires: Sequence[tuple[Slot, ...]]
) -> list[Move]:
    """Return where the pieces of one rank go, its own pieces of its own matrices included."""
    found: list[Move] = []
    for slot in layout.layout:
        if slot.name in owners:
            owner = owners[slot.name]
            place = next(s for s in wires[owner] if s.name == slot.name)
            found.append(Move(rank, owner, slot.offset, place.offset + slot.start, slot.numel))
    return found


def _pack(x: Tensor, ranges: Sequence[tuple[int, int]], buffer: Tensor) -> None:
    end = 0
    for offset, numel in ranges:
        buffer[end : end + numel].copy_(x[offset : offset + numel], non_blocking=True)
        end += numel


def _unpack(buffer: Tensor, ranges: Sequence[tuple[int, int]], out: Tensor) -> None:
    end = 0
    for offset, numel in ranges:
        out[offset : offset + numel].copy_(buffer[end : end + numel])
        end += numel
