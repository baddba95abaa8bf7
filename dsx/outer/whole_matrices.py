"""Whole matrices from shards: a codec that needs them gets each on one rank of the cluster.

Under ZeRO a rank holds ragged ranges of flattened matrices, of which no factors can be made: a flat
range reshaped to some width has another spectrum. So before coding, the pieces of each split
matrix move to one rank (matrix_owners.py), and the pieces of its mean move back: 4 bytes per
element each way inside the cluster, once per sync, a part at a time (piece_moves.py). Factors,
ranks and bits are then those of the whole matrix, whatever the shards. What stays where it is
(vectors, embeddings, most whole matrices) is not moved.

Both ways are collective over the ranks of the cluster, and every rank plans the same from all
ranks' layouts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dsx.core.buffers import Buffers
from dsx.core.engine import EngineAdapter
from dsx.core.types import Fragment, Slot
from dsx.method.fragments import in_a_row
from dsx.method.method import Method, SettingWarning
from dsx.outer.matrix_owners import Moved, WholeMatrices, share_out, wanted_whole
from dsx.outer.piece_moves import AllToAll, Move, PieceBuffers, PieceMoves

if TYPE_CHECKING:  # what only plans is started without torch
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)


class WirePiece(NamedTuple):
    """A range of a fragment from `offset` on, and where they are of a mean, and of what
    is sent: on the wire, or in copies (the same of both, where they pass between ranks).
    """

    offset: int
    numel: int
    mean: Tensor | None
    sent: Tensor | None
    is_copy: bool = False

    def of(self, vector: Tensor) -> Tensor:
        """Return them of a vector as the masters lie: a view."""
        return vector[self.offset : self.offset + self.numel]


class MatrixGather:
    """One fragment of one rank: its layout on the wire, and the way there and back.

    `moved` are the matrices that go to a rank, `buffers` those of all of the rank's fragments.
    """

    def __init__(
        self,
        layouts: Sequence[Fragment],
        rank: int,
        moved: Mapping[str, Moved],
        buffers: PieceBuffers,
    ) -> None:
        wires = [_wire_layout(layout, r, moved) for r, layout in enumerate(layouts)]
        own = layouts[rank]
        self.wire = Fragment(own.id, own.stage, wires[rank])
        self.is_needed = bool(moved)
        self._buffers = buffers
        self._moves = PieceMoves(_moves(layouts, moved, wires), rank, len(layouts), buffers)
        self._kept = _joined([*_kept(own, wires[rank], moved), *self._moves.stays])

    @property
    def memory(self) -> Buffers:
        """What pieces on their way are packed into: the same for all fragments."""
        return self._buffers.memory

    @property
    def buffer_bytes(self) -> int:
        """Return what that takes, of all fragments together."""
        return self._buffers.num_bytes

    def to_wire(self, x: Tensor, out: Tensor, all_to_all: AllToAll) -> None:
        """Write the fragment as it travels to `out`; `x` `[numel]` is as the masters lie."""
        for piece in self.pieces(None, out, all_to_all):
            assert piece.sent is not None
            piece.sent.copy_(piece.of(x))

    def from_wire(self, mean: Tensor, out: Tensor, all_to_all: AllToAll) -> None:
        """Write what came over the wire to `out` `[numel]`, as the masters lie.

        Without waiting for an accelerator: who writes to `mean` next waits for these copies.
        """
        for piece in self.pieces(mean, None, all_to_all):
            assert piece.mean is not None
            piece.of(out).copy_(piece.mean, non_blocking=True)

    def pieces(
        self, mean: Tensor | None, sent: Tensor | None, all_to_all: AllToAll
    ) -> Iterator[WirePiece]:
        """Yield the fragment piece by piece, with its elements of vectors as they travel.

        At the end `sent` has what was written to them meanwhile. Collective where it `is_needed`.
        """
        if not self.is_needed:
            yield WirePiece(0, self.wire.numel, mean, sent)
            return
        for offset, place, numel in self._kept:
            of_mean, of_sent = (cut(x, place, place + numel) for x in (mean, sent))
            yield WirePiece(offset, numel, of_mean, of_sent)
        for offset, values in self._moves.pieces(mean, sent, all_to_all):
            of_mean, of_sent = (None if x is None else values for x in (mean, sent))
            yield WirePiece(offset, values.numel(), of_mean, of_sent, is_copy=True)


def cut(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Return the elements from `start` to `stop` of a vector, if there is one."""
    return None if x is None else x[start:stop]


def plan_matrix_gathers(method: Method, adapter: EngineAdapter) -> list[MatrixGather]:
    """Return one gather per fragment. Collective over the cluster's ranks."""
    layouts, rank = [adapter.fragments], 0
    if method.compression.needs_whole_matrices:
        layouts, rank = adapter.ranks.layouts(adapter.fragments)
    return plan_gathers(layouts, rank, wanted_whole(method), adapter.device)


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


def buffer_bytes(gathers: Sequence[MatrixGather]) -> int:
    """Return what the pieces of a rank's matrices take on their way."""
    return max((gather.buffer_bytes for gather in gathers), default=0)


def plan_gathers(
    layouts: Sequence[Sequence[Fragment]],
    rank: int,
    wanted: WholeMatrices,
    device: torch.device | None,
) -> list[MatrixGather]:
    """Return a rank's part in every fragment; `layouts` are all ranks' fragments."""
    buffers = PieceBuffers(device)
    return [
        MatrixGather([fragments[index] for fragments in layouts], rank, of_fragment, buffers)
        for index, of_fragment in enumerate(share_out(layouts, wanted))
    ]


def wires_of(layouts: Sequence[Sequence[Fragment]], wanted: WholeMatrices) -> list[list[Fragment]]:
    """Return every rank's fragments as they travel; `layouts` are all ranks' as they lie."""
    moved = share_out(layouts, wanted)
    return [
        [
            Fragment(own.id, own.stage, _wire_layout(own, rank, of_fragment))
            for own, of_fragment in zip(layout, moved, strict=True)
        ]
        for rank, layout in enumerate(layouts)
    ]


def _wire_layout(layout: Fragment, rank: int, moved: Mapping[str, Moved]) -> tuple[Slot, ...]:
    """Return what a rank sends: its slots, with matrices whole where it is their rank, those
    behind the others of which it holds nothing.
    """
    slots: list[Slot] = []
    own = {name: to.slot for name, to in moved.items() if to.owner == rank}
    for slot in layout.layout:
        if slot.name not in moved:
            slots.append(slot)
        elif slot.name in own:
            slots.append(own.pop(slot.name))
    return in_a_row([*slots, *own.values()])


def _kept(
    own: Fragment, wire: Sequence[Slot], moved: Mapping[str, Moved]
) -> list[tuple[int, int, int]]:
    """Return `(offset, offset on the wire, numel)` of what is not moved."""
    places = {slot.name: slot.offset for slot in wire}
    return [(s.offset, places[s.name], s.numel) for s in own.layout if s.name not in moved]


def _joined(kept: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return them in order, with those that follow each other in both places as one."""
    found: list[tuple[int, int, int]] = []
    for offset, place, numel in sorted(kept):
        first, there, before = found[-1] if found else (0, 0, 0)
        if (first + before, there + before) == (offset, place) and found:
            found[-1] = (first, there, before + numel)
        elif numel:
            found.append((offset, place, numel))
    return found


def _moves(
    layouts: Sequence[Fragment], moved: Mapping[str, Moved], wires: Sequence[Sequence[Slot]]
) -> Iterator[Move]:
    """Yield where the pieces of all ranks go, those that are on their matrix's rank included."""
    places = {
        slot.name: slot.offset
        for rank, wire in enumerate(wires)
        for slot in wire
        if slot.name in moved and moved[slot.name].owner == rank
    }
    for rank, layout in enumerate(layouts):
        for slot in layout.layout:
            if slot.name in moved and slot.numel:
                to = moved[slot.name].owner
                yield Move(rank, to, slot.offset, places[slot.name] + slot.start, slot.numel)
