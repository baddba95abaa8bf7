"""Error feedback: what coding a fragment lost is added to what is sent of it next time.

    x = D + decay * e;    e = x - decoded(codes of x)

Source: EF-SGD (arXiv:1901.09847, Alg. 1), with the decay of SparseLoCo (arXiv:2508.15706). The
residual belongs to this rank and fragment, is updated when codes are made (never when the mean
returns), and travels with checkpoints. The owner of a slice keeps one of the mean it encodes, too,
so that what clusters apply adds up to what they have sent. Matrices in factors are without: the
int8 of their mean adds 0.04 to 0.4 % to the error that factors make.

`storage` is fp32 (4 bytes per element; decoded + residual is the input to one rounding), bf16 (2)
or int8 in groups of 256 (1.008), whose own rounding is then lost. What is stored in less is never
all in fp32 where the values are used up by their encoding: what is lost is made in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from dsx.compress.wire.base import TILE, Wire
from dsx.compress.wire.formats import FORMATS, Storage, is_made_in_place
from dsx.compress.wire.parts import places_of
from dsx.core.buffers import Opening


class ErrorFeedback(Protocol):
    """What is added to values that are encoded, and takes what is lost of them."""

    def opened(self) -> AbstractContextManager[Tensor]:
        """Hold it in fp32, as long as the values, to be replaced in place by what is lost."""
        ...


def read_part(
    read: Callable[[int, int], Tensor], numel: int, storage: Storage, start: int, stop: int
) -> Tensor:
    """Return elements start..stop, fp32, of what a residual of `numel` elements has `stored`.

    `read(a, b)` returns a part of that; of int8 whole groups are read, and their scales.
    """
    if storage == "fp32":
        return read(start, stop)
    wire = FORMATS[storage]()
    low = start // wire.granularity * wire.granularity
    high = min(-(-stop // wire.granularity) * wire.granularity, numel)
    part = Residual(high - low, storage, 1.0)
    places = places_of(wire, numel, low, high)
    part.stored.copy_(torch.cat([read(place.start, place.stop) for place in places]))
    return part.read()[start - low : stop - low]


class Residual:
    """The residual of `numel` elements, on the CPU; `stored` is what a checkpoint keeps.

    `is_in_place`: it may be made in the place of the values, and is, if it is stored in less.
    """

    def __init__(
        self,
        numel: int,
        storage: Storage,
        decay: float,
        opening: Opening | None = None,
        is_in_place: bool = False,
    ) -> None:
        self.numel = numel
        self.storage = storage
        self.is_in_place = is_in_place and is_made_in_place(storage, decay)
        self._decay = decay
        opening = opening or Opening()
        self._work = opening.work
        self._wire: Wire | None = None if storage == "fp32" else FORMATS[storage]()
        if self._wire is None:
            self.stored = opening.state.zeros(numel)
        else:
            self.stored = opening.state.zeros(self._wire.num_bytes(numel), dtype="uint8")
            # of who encodes
            own = opening.encoding if opening.at_launch else opening.buffers
            self._codec = self._wire.codec(numel, torch.device("cpu"), buffers=own)

    def read(self) -> Tensor:
        """Return a copy of the residual, fp32 `[numel]`, before any decay."""
        if self._wire is None:
            return self.stored.clone()
        values = torch.empty(self.numel)
        self._codec.decode(self.stored, values)
        return values

    def write(self, values: Tensor) -> None:
        """Replace the residual by `values` `[numel]`, as near as its storage allows."""
        if self._wire is None:
            self.stored.copy_(values)
        else:
            self._codec.encode(values, self.stored)

    def add_to(self, x: Tensor) -> None:
        """Add the decayed residual to `x`, fp32 `[numel]`, in place; it stays as it is."""
        if self.is_in_place:
            self._codec.decode_add(self.stored, x)
        elif self._wire is not None:
            with self._work.taken(self.numel) as residual:
                self._codec.decode(self.stored, residual)
                x.add_(self._decayed(residual))
        elif self._decay == 1:
            x.add_(self.stored)
        else:
            for part, own in zip(self.stored.split(TILE), x.split(TILE), strict=True):
                own.add_(part * self._decay)

    @contextmanager
    def opened(self) -> Generator[Tensor, None, None]:
        """Hold the decayed residual, fp32 `[numel]`, to be replaced in place by the new one."""
        if self._wire is None:
            yield self._decayed(self.stored)
            return
        with self._work.taken(self.numel) as residual:
            self._codec.decode(self.stored, residual)
            yield self._decayed(residual)
            self._codec.encode(residual, self.stored)

    @contextmanager
    def made_anew(self, most: int) -> Generator[Anew, None, None]:
        """Make it anew, all of it, in order and at most so many elements at a time."""
        if self._wire is None:
            yield Anew(self, self.stored, 0)
            return
        kept_together = self._wire.granularity
        with self._work.taken(min(most, self.numel) + kept_together) as work:
            anew = Anew(self, work, kept_together)
            yield anew
            anew.end()

    def write_part(self, start: int, values: Tensor) -> None:
        """Replace elements from `start` on, whole groups but at the end, by `values` `[n]`."""
        assert self._wire is not None
        for begin in range(0, values.numel(), TILE):
            piece = values[begin : begin + TILE]
            message = torch.empty(self._wire.num_bytes(piece.numel()), dtype=torch.uint8)
            self._codec.encode(piece, message)
            first = start + begin
            for place in places_of(self._wire, self.numel, first, first + piece.numel()):
                length = place.stop - place.start
                self.stored[place].copy_(message[:length])
                message = message[length:]

    def _decayed(self, residual: Tensor) -> Tensor:
        return residual if self._decay == 1 else residual.mul_(self._decay)


class Anew:
    """A residual that is made anew, some elements at a time: what they are is written where `room`
    says, and stored once there is room for the next.

    `work` is where they are; what is short of a whole group waits there for the next ones. With
    nothing `kept_together` it is the residual itself.
    """

    def __init__(self, residual: Residual, work: Tensor, kept_together: int) -> None:
        self._residual, self._work, self._kept_together = residual, work, kept_together
        self._stored = self._waiting = 0

    def room(self, numel: int) -> Tensor:
        """Return where the next `numel` elements are to be written, fp32."""
        if not self._kept_together:
            self._stored += numel
            return self._work[self._stored - numel : self._stored]
        self._store(self._waiting // self._kept_together * self._kept_together)
        self._waiting += numel
        return self._work[self._waiting - numel : self._waiting]

    def end(self) -> None:
        """Store the last ones."""
        self._store(self._waiting)
        assert self._stored == self._residual.numel, "a residual was not made anew as a whole"

    def _store(self, numel: int) -> None:
        self._residual.write_part(self._stored, self._work[:numel])
        rest = self._work[numel : self._waiting].clone()
        self._work[: rest.numel()].copy_(rest)
        self._stored, self._waiting = self._stored + numel, rest.numel()
