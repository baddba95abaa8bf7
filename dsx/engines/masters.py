"""The fp32 masters of a rank by fragment: pieces of an engine's own tensors, read and written."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
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
    def numel(self) -> int:
        """Elements of the piece."""
        return math.prod(self.shape)

    def flat(self) -> Tensor:
        """Return the elements of `master`, in a row."""
        return self.master.detach().view(-1)

    def view(self) -> Tensor:
        """Return the live elements `[numel]`; not to be kept."""
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

    def read(self, fragment: int, out: Tensor) -> None:
        """Copy the masters of a fragment into `out` `[numel]`, in place."""
        for offset, piece in self._pieces[fragment]:
            out[offset : offset + piece.numel].copy_(piece.view())

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite the masters of a fragment, in place, with `source` `[numel]`."""
        for offset, piece in self._pieces[fragment]:
            piece.overwrite(source[offset : offset + piece.numel])


class MastersAdapter:
    """The part of an adapter (core/engine.py) that follows from its rank's masters alone."""

    def _hold(self, masters: Masters, device: torch.device, keeps_state_on_host: bool) -> None:
        """Take the masters, which are on `device`."""
        self._masters = masters
        self.fragments = masters.fragments
        self.fragment_numel = masters.fragment_numel
        self.fragment_parameters = masters.fragment_parameters
        self.pins_host_memory = device.type == "cuda"
        self.device = torch.device("cpu") if keeps_state_on_host else device

    def read(self, fragment: int, out: Tensor) -> None:
        """Copy the masters of a fragment into `out`, in place."""
        self._masters.read(fragment, out)

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite the masters of a fragment, in place."""
        self._masters.write(fragment, source)
