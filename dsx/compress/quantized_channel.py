"""The channel of `Quantized`, and the coded runs that low rank leaves to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from dsx.compress.averaging import CodedMean
from dsx.compress.base import Launch
from dsx.compress.coded_runs import CodedRun, CodedRuns, SmallPart
from dsx.compress.error_feedback import Residual
from dsx.compress.slices import LOST_TOGETHER
from dsx.core.buffers import Opening
from dsx.core.exchange import Exchange
from dsx.core.membership import Seat
from dsx.core.types import Fragment

if TYPE_CHECKING:
    from dsx.compress.quantized import Feedback, Quantized


class QuantizedChannel(CodedRuns):
    """Runs of matrices, each one coded vector, and the small rest."""

    def __init__(self, method: Quantized, fragment: Fragment, seat: Seat, opening: Opening) -> None:
        runs = [
            CodedPart(
                method, start, stop, seat,
                seed=part_seed(fragment.id, index, seat), opening=opening,
            )
            for index, (start, stop) in enumerate(fragment.coded_runs)
        ]  # fmt: skip
        super().__init__(runs, SmallPart(method.small_wire, fragment, seat, opening))


class CodedPart(CodedRun):
    """One run of elements, averaged in codes.

    `keeps_mean`: whether the owner of a slice keeps what coding the mean loses; not for what
    travels in codes now and then only. `is_settled`: the residual is added to values by `take_in`,
    and made anew by `settle`, not by the exchange.
    """

    def __init__(
        self,
        method: Quantized,
        start: int,
        stop: int,
        seat: Seat,
        seed: int,
        keeps_mean: bool = True,
        opening: Opening | None = None,
        is_settled: bool = False,
    ) -> None:
        self.start, self.stop = start, stop
        self._seed = seed
        self._is_settled = is_settled
        opening = opening or Opening()
        self.mean = CodedMean(
            stop - start, method.up, method.down, seat, method.kernels, opening=opening
        )
        self.residual = _residual(method, method.error_feedback, stop - start, opening)
        bounds = method.mean_bounds(stop - start, seat.num_clusters, self.mean.num_slices)
        self.mean_bounds = first, last = bounds[seat.position] if keeps_mean else (0, 0)
        here = replace(opening, at_launch=0)  # means are encoded by the transfer's thread
        self.of_mean = _residual(method, method.kept_of_means, last - first, here)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the run inside `x`, in place."""
        run, seed = x[self.start : self.stop], self._seed_of(launch)
        return self.mean.exchange(run, self._coded_with, seed, self.of_mean, launch.round)

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode the run inside `x`, in place of it what is decoded."""
        run, seed = x[self.start : self.stop], self._seed_of(launch)
        self.mean.encode(run, self.residual, seed, launch.round)

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Make the residual what the exchange of the run inside `x`, used up, would have left."""
        run, seed = x[self.start : self.stop], self._seed_of(launch)
        if self.residual is not None:
            self.mean.recode(run, self._coded_with, seed)

    def take_in(self, x: Tensor) -> None:
        """Add what was lost before to the run inside `x`."""
        if self.residual is not None:
            self.residual.add_to(x[self.start : self.stop])

    def settle(self, x: Tensor) -> None:
        """Make the residual what the codes made last miss of the run inside `x`, taken in."""
        if self.residual is not None:
            with self.residual.made_anew(LOST_TOGETHER) as anew:
                self.mean.write_lost(x[self.start : self.stop], anew)

    @property
    def _coded_with(self) -> Residual | None:
        return None if self._is_settled else self.residual

    def _seed_of(self, launch: Launch) -> int:
        return self._seed + 1_000_003 * launch.round


def part_seed(fragment: int, part: int, seat: Seat) -> int:
    """Return what tells the noise of one part and cluster from the others'."""
    return (fragment * 1_009 + part) * 4_099 + seat.cluster_id * 31


def _residual(
    method: Quantized, storage: Feedback, numel: int, opening: Opening
) -> Residual | None:
    """Return a residual of `numel` elements, or None without error feedback or elements."""
    if storage == "none" or not numel:
        return None
    return Residual(numel, storage, method.feedback_decay, opening, is_in_place=True)
