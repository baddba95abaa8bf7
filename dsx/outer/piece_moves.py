"""Pieces of matrices on their way between the ranks of a cluster, a bounded part at a time.

A fragment's pieces go in passes, each an all-to-all in which every rank has to do with as much as
`MOVED_AT_A_TIME` elements each way, of every other rank an equal part. What comes in a pass may be
used, and others put in its place, which then go back to where those came from. All fragments of a
rank, and both ways, take turns with the vectors that pieces are packed into; what stays on its rank
does not pass through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dsx.core.buffers import Buffers, one_behind_another

if TYPE_CHECKING:  # what only plans is started without torch
    import torch
    from torch import Tensor

MOVED_AT_A_TIME = 2**24  # elements that a rank sends, or receives, in a pass
AllToAll = Callable[[Sequence["Tensor"], Sequence["Tensor"]], None]


@dataclass(frozen=True)
class Move:
    """A piece of a matrix: where it lies on its home rank, and where on the matrix's rank."""

    home: int
    owner: int
    home_offset: int
    wire_offset: int
    numel: int


class Range(NamedTuple):
    """A piece, or a part of one, in a rank's fragment as it lies, or as it travels."""

    offset: int
    numel: int


class PieceBuffers:
    """The two vectors that a rank's pieces are packed into, for all fragments in turn.

    On `device`, made when first used, as long as `need` was told; a plan makes none.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.memory = Buffers(device or "cpu")
        self._numel = 0, 0

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return 4 * sum(self._numel)

    def need(self, away: int, here: int) -> None:
        """Have room for as many elements of this rank's on their way, and of others'."""
        self._numel = max(self._numel[0], away), max(self._numel[1], here)

    @cached_property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """Those of this rank's pieces, and of others'."""
        away, here = self._numel
        return self.memory.zeros(away), self.memory.zeros(here)


class PieceMoves:
    """The moves of one fragment that a rank takes part in, of `moves` that are all ranks'."""

    def __init__(
        self, moves: Iterable[Move], rank: int, num_ranks: int, buffers: PieceBuffers
    ) -> None:
        away, here = ([list[Range]() for _ in range(num_ranks)] for _ in range(2))
        elements = [[0] * num_ranks, [0] * num_ranks]  # that ranks send, and receive
        self.stays: list[tuple[int, int, int]] = []  # where it lies, and travels, and its length
        for move in moves:
            if move.home == move.owner:
                if move.home == rank:
                    self.stays.append((move.home_offset, move.wire_offset, move.numel))
                continue
            elements[0][move.home] += move.numel
            elements[1][move.owner] += move.numel
            if move.home == rank:
                away[move.owner].append(Range(move.home_offset, move.numel))
            if move.owner == rank:
                here[move.home].append(Range(move.wire_offset, move.numel))
        self._passes = -(-max(map(max, elements)) // MOVED_AT_A_TIME)
        self._away, self._here = (_Streams(pieces, self._passes) for pieces in (away, here))
        self._buffers = buffers
        buffers.need(self._away.room, self._here.room)

    def pieces(
        self, mean: Tensor | None, sent: Tensor | None, all_to_all: AllToAll
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield where a piece lies on this rank, and its elements `[n]`, in turn.

        They are of `mean`, as that lies with the owners, if there is one; what they are when the
        next piece is asked for goes to the owners' `sent`, if there is one.
        """
        away, here = self._buffers.vectors
        for number in range(self._passes):
            own, theirs = self._away.places(number, away), self._here.places(number, here)
            if mean is not None:
                self._here.pack(number, mean, theirs)
                all_to_all(theirs, own)
            yield from self._away.pieces(number, own)
            if sent is not None:
                all_to_all(own, theirs)
                self._here.unpack(number, theirs, sent)


class _Streams:
    """What goes to each rank, or comes from it, piece behind piece, in as many parts as passes."""

    def __init__(self, pieces: Sequence[Sequence[Range]], passes: int) -> None:
        self._pieces = pieces
        self._passes = passes
        self._numel = [sum(piece.numel for piece in of_rank) for of_rank in pieces]

    @property
    def room(self) -> int:
        """The elements of a pass, at most."""
        return sum(-(-numel // self._passes) for numel in self._numel) if self._passes else 0

    def places(self, number: int, vector: Tensor) -> list[Tensor]:
        """Return where a pass's elements of each rank lie in a vector."""
        bounds = [self._bounds(numel, number) for numel in self._numel]
        return one_behind_another(vector, (stop - start for start, stop in bounds))

    def pieces(self, number: int, places: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a pass by where they lie, with their elements among `places`."""
        for place, of_rank in zip(places, self._parts(number), strict=True):
            end = 0
            for offset, numel in of_rank:
                yield offset, place[end : end + numel]
                end += numel

    def pack(self, number: int, x: Tensor, places: Sequence[Tensor]) -> None:
        """Fill the places of a pass with elements of `x`."""
        for offset, place in self.pieces(number, places):
            place.copy_(x[offset : offset + place.numel()], non_blocking=True)

    def unpack(self, number: int, places: Sequence[Tensor], out: Tensor) -> None:
        """Write what has come of a pass to `out`."""
        for offset, place in self.pieces(number, places):
            out[offset : offset + place.numel()].copy_(place)

    def _parts(self, number: int) -> Iterator[list[Range]]:
        """Yield the parts of pieces that are in a pass, rank by rank."""
        for pieces, length in zip(self._pieces, self._numel, strict=True):
            first, last = self._bounds(length, number)
            found, begin = list[Range](), 0
            for offset, numel in pieces:
                start, stop = max(first - begin, 0), min(last - begin, numel)
                if stop > start:
                    found.append(Range(offset + start, stop - start))
                begin += numel
            yield found

    def _bounds(self, numel: int, number: int) -> tuple[int, int]:
        return numel * number // self._passes, numel * (number + 1) // self._passes
