"""The channel of `RandomTopK`: the random selection, and the mean of what is picked.

A round's positions are a hash of fragment, run, round and place (the noise of stochastic rounding,
wire/group_kernels.py): the same in all clusters and on all machines, and again after a resume.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.averaging import CodedMean
from dsx.compress.base import Launch
from dsx.compress.coded_runs import CodedRun, CodedRuns, SmallPart
from dsx.compress.error_feedback import Residual
from dsx.compress.wire.base import TILE
from dsx.compress.wire.group_kernels import fill_noise, noise_key
from dsx.core.buffers import Buffers, Opening
from dsx.core.exchange import Exchange
from dsx.core.membership import Seat
from dsx.core.types import Fragment

if TYPE_CHECKING:
    from dsx.compress.random_top_k import RandomTopK


class RandomTopKChannel(CodedRuns):
    """Runs of matrices, of each what is picked, and the small rest."""

    def __init__(
        self, method: RandomTopK, fragment: Fragment, seat: Seat, opening: Opening
    ) -> None:
        runs = [
            PickedPart(method, start, stop, seat, fragment.id * 1_009 + index, opening)
            for index, (start, stop) in enumerate(fragment.coded_runs)
        ]
        super().__init__(runs, SmallPart(method.small_wire, fragment, seat, opening))


class PickedPart(CodedRun):
    """One run of elements, of which the picked ones are averaged in codes."""

    def __init__(
        self, method: RandomTopK, start: int, stop: int, seat: Seat, seed: int, opening: Opening
    ) -> None:
        self.start, self.stop = start, stop
        numel, self._seed = stop - start, seed
        form, count = method.format, method.num_picked(numel)
        self.mean = CodedMean(count, form, form, seat, opening=opening)
        self._picked = Picked(numel, count, opening.buffers, opening.buffers)
        self._picked_at_launch = (
            Picked(numel, count, opening.buffers, opening.encoding) if opening.at_launch else None
        )
        self.residual = None
        if method.error_feedback != "none":
            storage, decay = method.error_feedback, method.feedback_decay
            self.residual = Residual(numel, storage, decay, opening)
        bounds = method.mean_bounds(numel, seat.num_clusters, self.mean.num_slices)
        self.mean_bounds = first, last = bounds[seat.position]
        self.of_mean = None
        if last > first:  # means are encoded by the transfer's thread
            here = replace(opening, at_launch=0)
            self.of_mean = Residual(last - first, method.mean_feedback, 1.0, here)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the run inside `x`, in place."""
        run, picked = x[self.start : self.stop], self._picked
        picked.choose(self._seed, launch.round)
        is_encoded = self._picked_at_launch is not None
        own = None if is_encoded else self._feedback(run, picked)
        if own is None and not is_encoded:
            picked.take(run)
        of_mean = None
        if self.of_mean is not None:
            of_mean = MeanFeedback(self.of_mean, picked, *self.mean_bounds)
        yield from self.mean.exchange(picked.values, own, of_mean=of_mean, number=launch.round)
        picked.put(run)
        return x

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode the run inside `x`, in place of it what is decoded."""
        run, picked = x[self.start : self.stop], self._picked_at_launch
        assert picked is not None, "opened for codes that are made by the exchange"
        picked.choose(self._seed, launch.round)
        own = self._feedback(run, picked)
        if own is None:
            picked.take(run)
        self.mean.encode(picked.values, own, number=launch.round)
        picked.put(run)

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Make the residual what the exchange of the run inside `x`, used up, would have left."""
        run, picked = x[self.start : self.stop], self._picked
        if self.residual is not None:
            picked.choose(self._seed, launch.round)
            self.mean.recode(picked.values, self._feedback(run, picked))

    def _feedback(self, run: Tensor, picked: Picked) -> RunFeedback | None:
        return None if self.residual is None else RunFeedback(self.residual, run, picked)


class Picked:
    """The picked elements of a run: positions, int64 and ascending, and values, both `[count]`."""

    def __init__(self, numel: int, count: int, buffers: Buffers, work: Buffers) -> None:
        self._numel = numel
        self._new = work.work
        self._key = torch.zeros(3, dtype=torch.int32)
        self.positions = buffers.zeros(count, dtype="int64")
        self.values = buffers.zeros(count)

    def choose(self, seed: int, round: int) -> None:
        """Pick one element at random of each of `count` stretches, for a round."""
        count = self.positions.numel()
        length, longer = divmod(self._numel, count)
        for start in range(0, count, TILE):
            tile = self.positions[start : start + TILE]
            noise = self._new("noise", (tile.numel(),), torch.float32)
            words = noise_key(seed + 1_000_003 * round, start)
            self._key.copy_(torch.tensor(words, dtype=torch.int32))
            fill_noise(self._key, noise, self._new)
            index = torch.arange(start, start + tile.numel())
            extra = (index - (count - longer)).clamp_(min=0)  # longer stretches before this one
            lengths = length + (index >= count - longer).int()
            tile.copy_(torch.minimum((noise * lengths).floor_(), lengths - 1))
            tile.add_(index, alpha=length).add_(extra)

    def lost(self, count: int) -> Tensor:
        """Return work space for what coding so many picked elements loses."""
        return self._new("lost", (count,), torch.float32)

    def take(self, run: Tensor) -> None:
        """Copy the picked elements of a run to `values`."""
        torch.index_select(run, 0, self.positions, out=self.values)

    def put(self, run: Tensor) -> None:
        """Make a run zero but for `values`."""
        run.zero_().index_copy_(0, self.positions, self.values)


@dataclass(frozen=True)
class RunFeedback:
    """What a run's picked values are encoded with: all of `run` goes into the residual first."""

    residual: Residual
    run: Tensor
    picked: Picked

    @contextmanager
    def opened(self) -> Generator[Tensor, None, None]:
        """Set `values` to what is to be sent; hold zeros `[count]`, to become what is lost."""
        picked = self.picked
        with self.residual.opened() as residual:
            residual.add_(self.run)
            picked.take(residual)
            lost = picked.lost(picked.values.numel()).zero_()
            yield lost
            residual.index_copy_(0, picked.positions, lost)


@dataclass(frozen=True)
class MeanFeedback:
    """What the mean of an owner's slice is encoded with: the picked ones of elements start..stop.

    The others keep what they have lost till they are picked.
    """

    residual: Residual
    picked: Picked
    start: int
    stop: int

    @contextmanager
    def opened(self) -> Generator[Tensor, None, None]:
        """Hold what was lost of the slice's picked elements, to become what is lost now."""
        bounds = torch.tensor([self.start, self.stop])
        first, last = torch.searchsorted(self.picked.positions, bounds).tolist()
        positions = self.picked.positions[first:last] - self.start
        with self.residual.opened() as residual:
            lost = self.picked.lost(last - first)
            torch.index_select(residual, 0, positions, out=lost)
            yield lost
            residual.index_copy_(0, positions, lost)
