"""The channel of `Quantized`, and the parts that others are made of: coded runs, the small rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.averaging import CodedMean
from dsx.compress.base import Channel, CodingError, Launch
from dsx.compress.error_feedback import Residual
from dsx.compress.wire.formats import FORMATS
from dsx.core.exchange import Exchange, together
from dsx.core.membership import Seat
from dsx.core.types import Fragment

if TYPE_CHECKING:
    from dsx.compress.quantized import Quantized, SmallWire


class QuantizedChannel(Channel):
    """Runs of matrices, each one coded vector, and the small rest."""

    def __init__(self, method: Quantized, fragment: Fragment, seat: Seat) -> None:
        self._parts = [
            CodedPart(method, start, stop, seat, seed=part_seed(fragment.id, index, seat))
            for index, (start, stop) in enumerate(fragment.coded_runs)
        ]
        self._small = SmallPart(method.small_wire, fragment, seat)

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of the runs."""
        return coding_errors("residual", self._parts)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in place; all clusters decode the same bytes."""
        parts = [part.exchange(x, launch) for part in self._parts]
        yield from together(*parts, self._small.exchange(x))
        return x


class CodedPart:
    """One run of elements, averaged in codes.

    `keeps_mean`: whether the owner of a slice keeps what coding the mean loses; not for what
    travels in codes now and then only.
    """

    def __init__(
        self,
        method: Quantized,
        start: int,
        stop: int,
        seat: Seat,
        seed: int,
        keeps_mean: bool = True,
    ) -> None:
        self.start, self.stop = start, stop
        self._seed = seed
        self._mean = CodedMean(stop - start, method.up, method.down, seat, method.kernels)
        self.residual = _residual(method, stop - start)
        bounds = method.mean_bounds(stop - start, seat.num_clusters)[seat.position]
        self.mean_bounds = first, last = bounds if keeps_mean else (0, 0)
        self.of_mean = _residual(method, last - first) if last > first else None

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the run inside `x`, in place."""
        seed = self._seed + 1_000_003 * launch.round
        return self._mean.exchange(x[self.start : self.stop], self.residual, seed, self.of_mean)

    def add_residual(self, x: Tensor) -> None:
        """Add what was lost before to the run inside `x`; low-rank rounds then replace it."""
        if self.residual is not None:
            with self.residual.opened() as residual:
                x[self.start : self.stop].add_(residual)


def coding_errors(kind: str, parts: Sequence[CodedPart]) -> dict[str, CodingError]:
    """Return what runs keep of what coding lost, by name: of the values sent, and of the means."""
    named: dict[str, CodingError] = {}
    for index, part in enumerate(parts):
        name, start = f"{kind}.{index}", part.start
        if part.residual is not None:
            named[name] = CodingError(start, part.stop, part.residual)
        if part.of_mean is not None:
            first, last = part.mean_bounds
            named[f"{name}.mean"] = CodingError(start + first, start + last, part.of_mean, True)
    return named


class SmallPart:
    """The vectors and small matrices of a fragment, in one message to all."""

    def __init__(self, wire: SmallWire, fragment: Fragment, seat: Seat) -> None:
        self._ranges = fragment.small_runs
        numel = sum(stop - start for start, stop in self._ranges)
        self._values = torch.zeros(numel)
        format = FORMATS[wire]()
        self._mean = CodedMean(numel, format, format, seat, is_gathered=True)

    def exchange(self, x: Tensor) -> Exchange:
        """Average the small slots inside `x`, in place."""
        if not self._values.numel():
            return x
        parts = self._values.split([stop - start for start, stop in self._ranges])
        for part, (start, stop) in zip(parts, self._ranges, strict=True):
            part.copy_(x[start:stop])
        yield from self._mean.exchange(self._values)
        for part, (start, stop) in zip(parts, self._ranges, strict=True):
            x[start:stop].copy_(part)
        return x


def part_seed(fragment: int, part: int, seat: Seat) -> int:
    """Return what tells the noise of one part and cluster from the others'."""
    return (fragment * 1_009 + part) * 4_099 + seat.cluster_id * 31


def _residual(method: Quantized, numel: int) -> Residual | None:
    """Return a residual of `numel` elements, or None without error feedback."""
    if method.error_feedback == "none":
        return None
    return Residual(numel, method.error_feedback, method.feedback_decay)
