"""The fp32 masters of a rank by fragment: pieces of an engine's own tensors, read and written."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsx.core.types import ParameterShape
from dsx.method.fragments import lay_out


@dataclass(frozen=True)
class Piece:
    """The part of one parameter whose fp32 master this rank owns, and its place there and here.

    `master` is the engine's own tensor, in which the piece starts at `offset`. It is looked into
    at every access: an engine may replace its storage, and we must not keep the old one alive.
    `shape` is the parameter's own where the piece is all of it, else `(numel,)`; `start` is the
    first element in the flattened parameter.
    """

    master: Tensor
    shape: tuple[int, ...]
    start: int = 0
    offset: int = 0

    @property
    def is_live(self) -> bool:
        """Whether `view` gives the elements themselves: what is written there is in them."""
        return True

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return math.prod(self.shape)

    def flat(self) -> Tensor:
        """Return the elements of `master`, in a row."""
        return self.master.detach().view(-1)

    def view(self) -> Tensor:
        """Return the elements `[numel]`, live ones if `is_live`; not to be kept."""
        return self.flat()[self.offset : self.offset + self.numel]

    def overwrite(self, values: Tensor) -> None:
        """Write elements `[numel]`, in place."""
        self.view().copy_(values)

    def cut(self, first: int, last: int) -> Piece | None:
        """Return what lies between two elements of the flattened parameter, if anything does."""
        first, last = max(first, self.start), min(last, self.start + self.numel)
        if last <= first:
            return None
        if last - first == self.numel:
            return self
        offset = self.offset + first - self.start
        return replace(self, shape=(last - first,), start=first, offset=offset)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory: those of a dry run have a shape only."""
    fakes: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is None or not isinstance(tensor, fakes.FakeTensor)


def dtype_name(parameter: Tensor) -> str:
    """Return the name of a tensor's type without torch's: bfloat16."""
    return str(parameter.dtype).removeprefix("torch.")


class Masters:
    """Reads and writes a rank's masters by fragment, where they are at that time."""

    def __init__(
        self,
        parameters: Sequence[ParameterShape],
        assignment: Sequence[Sequence[str]],
        pieces: Mapping[str, Piece],
        stage: int = 0,
    ) -> None:
        shapes = {p.name: p for p in parameters}
        self.fragment_parameters = [[shapes[name] for name in names] for names in assignment]
        self.fragment_numel = [sum(p.numel for p in ps) for ps in self.fragment_parameters]
        places = {name: (piece.shape, piece.start) for name, piece in pieces.items()}
        wholes = {p.name: p.shape for p in parameters}
        self.fragments = lay_out(assignment, places, wholes, stage)
        self._pieces = [
            [(slot.offset, pieces[slot.name]) for slot in fragment.layout]
            for fragment in self.fragments
        ]
        self._offsets = [[offset for offset, _ in pieces] for pieces in self._pieces]

    def read(self, fragment: int, out: Tensor, start: int = 0) -> None:
        """Copy the masters of a fragment from element `start` on into `out` `[n]`, in place."""
        for place, piece in self._parts(fragment, start, start + out.numel()):
            out[place : place + piece.numel].copy_(piece.view())

    def write(self, fragment: int, source: Tensor, start: int = 0) -> None:
        """Overwrite the masters of a fragment from element `start` on with `source` `[n]`."""
        for place, piece in self._parts(fragment, start, start + source.numel()):
            piece.overwrite(source[place : place + piece.numel])

    def in_a_row(self, fragment: int, start: int, stop: int) -> Tensor | None:
        """Return the live elements from `start` to `stop` if one fp32 tensor has them, or None.

        Not to be kept.
        """
        found = [piece for _, piece in self._parts(fragment, start, stop)]
        if len(found) != 1 or not found[0].is_live:
            return None
        live = found[0].view()
        return live if live.dtype == torch.float32 else None

    def _parts(self, fragment: int, start: int, stop: int) -> Iterator[tuple[int, Piece]]:
        """Yield what lies between two elements of a fragment, and how far behind `start`."""
        pieces = self._pieces[fragment]
        index = max(bisect_right(self._offsets[fragment], start) - 1, 0)
        while index < len(pieces) and pieces[index][0] < stop:
            offset, piece = pieces[index]
            index += 1
            first = piece.start - offset  # of the parameter, where the fragment begins
            part = piece.cut(first + start, first + stop)
            if part is not None:
                yield part.start - first - start, part


class MastersAdapter:
    """The part of an adapter (core/engine.py) that follows from its rank's masters alone."""

    tells_model: bool = False

    def _hold(self, masters: Masters, device: torch.device, keeps_state_on_host: bool) -> None:
        """Take the masters, which are on `device`."""
        self._masters = masters
        self.fragments = masters.fragments
        self.fragment_numel = masters.fragment_numel
        self.fragment_parameters = masters.fragment_parameters
        self.pins_host_memory = device.type == "cuda"
        self.device = torch.device("cpu") if keeps_state_on_host else device

    def read(self, fragment: int, out: Tensor, start: int = 0) -> None:
        """Copy the masters of a fragment from `start` on into `out`, in place."""
        self._masters.read(fragment, out, start)

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite the masters of a fragment, in place."""
        self.write_part(fragment, source, 0)
        self.end_write(fragment)

    def in_a_row(self, fragment: int, start: int, stop: int) -> Tensor | None:
        """Return live masters that outer steps may be taken in, None where they lie elsewhere."""
        found = self._masters.in_a_row(fragment, start, stop)
        return found if found is not None and found.device == self.device else None

    def write_part(self, fragment: int, source: Tensor, start: int) -> None:
        """Overwrite the masters of a fragment from `start` on, in place."""
        self._masters.write(fragment, source, start)

    def end_write(self, fragment: int) -> None:
        """Nothing more is to be done."""
