"""The vectors that the transfers of one fragment take turns with.

A launch takes one for what it sends. Its exchange takes one to work in, which becomes the mean,
once the headers have come from all: every cluster has then ended the transfers before it, and what
those have sent is needed no more. So with b transfers under way at most there are b + 1 vectors:
each has what it sends or its mean, and one, at a time, has both.

Where a mean leaves its vector to the next launch as it is applied (passing_on.py), b will do. With
the state on disk, what is sent lies there, and what travels does not: b vectors of either kind.
Where codes are made at the launch, they are what is kept of it, and a transfer has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from dsx.outer.parity_check import ParityResult
from dsx.outer.sideband import Sideband


@dataclass
class TransferBuffers:
    """What one transfer under way has; its own until it has been applied, and until others need it.

    `sent` and `posted` are the contribution and its sideband: as they were at the launch, but for
    what a contribution takes in once it has been averaged. `wire` and `sideband` are what an
    attempt works on, and then the means. `is_shared`: codes are made at the launch, and `sent` is
    `wire`. `round` is the launch whose they are, also once it has been applied.
    """

    sideband: Sideband
    posted: Sideband
    kept: Tensor | None
    arenas: Arenas = field(repr=False)
    parity: ParityResult = field(default_factory=ParityResult)
    is_free: bool = True
    round: int = 0
    mean_norm: Tensor | None = None  # 0-dim; once an attempt has ended, on a host
    held_sent: Tensor | None = None
    held_wire: Tensor | None = None
    is_passed_on: bool = False  # the mean's vector, to a later launch

    @property
    def is_shared(self) -> bool:
        """Whether what is sent becomes its mean."""
        return self.arenas.is_shared

    @property
    def sent(self) -> Tensor:
        """What is sent, fp32 `[numel]` as it travels."""
        assert self.held_sent is not None, f"launch {self.round}: what was sent is there no more"
        return self.held_sent

    @property
    def wire(self) -> Tensor:
        """What an exchange works in, once `begin` has been called; then the mean."""
        assert self.held_wire is not None, f"launch {self.round}: its exchange has not begun"
        return self.held_wire

    def holds(self, round: int) -> bool:
        """Whether the mean of a launch is still here."""
        return self.round == round and self.held_wire is not None

    def begin(self) -> Tensor:
        """Return what an exchange works in, contents undefined; the transfers before have ended."""
        return self.arenas.begin(self)

    def pass_on(self, other: TransferBuffers) -> None:
        """Leave the mean's vector to what another transfer sends: it is being used up."""
        self.arenas.pass_on(self, other)

    def lend(self) -> None:
        """Get a vector for what is sent, if there is none: one beyond all, if they are taken."""
        self.arenas.lend(self)


class Arenas:
    """Those of one fragment; `take` is for the training thread, `begin` for any one.

    `sent` are vectors for what is sent, `travelling` for what exchanges work in, if others.
    `passes_on`: means leave theirs to launches, so there is one less (passing_on.py). Where more
    are needed then, as where a round is made again after a resume, they last while they are held.
    """

    def __init__(
        self,
        sidebands: Sequence[tuple[Sideband, Sideband, Tensor | None]],
        sent: Sequence[Tensor],
        travelling: Sequence[Tensor] | None = None,
        is_shared: bool = False,
        passes_on: bool = False,
    ) -> None:
        self.is_shared, self._passes_on = is_shared, passes_on
        self.buffers = [TransferBuffers(*each, self) for each in sidebands]
        self._sent, self._travelling = sent, travelling or sent
        self._lock = Lock()

    def take(self, round: int, sends: bool = True) -> TransferBuffers | None:
        """Return buffers that are free, for a launch, marked taken; None if there are none.

        `sends`: with a vector for what is sent, contents undefined.
        """
        with self._lock:
            free = [buffers for buffers in self.buffers if buffers.is_free]
            if not free:
                return None
            taken = min(free, key=lambda buffers: buffers.round)
            taken.is_free, taken.round, taken.mean_norm = False, round, None
            taken.is_passed_on = False
            mean, taken.held_sent, taken.held_wire = taken.held_wire, None, None
            if sends or self.is_shared:
                # an accelerator may still read that mean: what is sent is copied behind it
                taken.held_sent = self._find(self._sent, round, mean)
            if self.is_shared:
                taken.held_wire = taken.held_sent
            return taken

    def begin(self, buffers: TransferBuffers) -> Tensor:
        """Return the vector that an exchange works in, the same until others take its buffers."""
        with self._lock:
            if buffers.held_wire is None:
                for other in self.buffers:
                    if other.round < buffers.round:
                        other.held_sent = None
                buffers.held_wire = self._find(self._travelling, buffers.round)
            return buffers.held_wire

    def pass_on(self, source: TransferBuffers, target: TransferBuffers) -> None:
        """Give the vector that a mean lies in to what another transfer sends."""
        with self._lock:
            source.is_passed_on = True
            if source.held_wire is not None:
                target.held_sent, source.held_wire = source.held_wire, None
        self.lend(target)

    def lend(self, buffers: TransferBuffers) -> None:
        """Give a vector for what is sent to buffers that were taken without."""
        with self._lock:
            if buffers.held_sent is None:
                buffers.held_sent = self._find(self._sent, buffers.round)

    def free(self) -> None:
        """Take all back: nothing is under way any more, and rounds may begin anew."""
        with self._lock:
            for buffers in self.buffers:
                buffers.is_free, buffers.round = True, 0
                buffers.held_sent = buffers.held_wire = None

    def _find(self, vectors: Sequence[Tensor], round: int, best: Tensor | None = None) -> Tensor:
        held = [t for b in self.buffers for t in (b.held_sent, b.held_wire) if t is not None]
        free = [vector for vector in vectors if not any(vector is other for other in held)]
        if not free and self._passes_on:
            return torch.zeros_like(vectors[0])
        assert free, f"launch {round}: more is under way than its policy said"
        return next((vector for vector in free if vector is best), free[0])
