"""Channels of coded runs: each run of matrices in codes, and the small rest beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from dsx.compress.averaging import CodedMean
from dsx.compress.base import Channel, CodingError, Launch
from dsx.compress.error_feedback import Residual
from dsx.compress.wire.formats import FORMATS
from dsx.core.buffers import Opening
from dsx.core.exchange import Exchange, together
from dsx.core.membership import Seat
from dsx.core.types import Fragment

if TYPE_CHECKING:
    from dsx.compress.quantized import SmallWire


class CodedRun(Protocol):
    """One run of elements of a fragment, averaged in codes; to be derived from.

    `residual` keeps what is lost of the values sent; `of_mean`, where this cluster encodes means
    for all, what is lost of those, of the run's elements `mean_bounds`.
    """

    start: int
    stop: int
    mean: CodedMean
    residual: Residual | None = None
    of_mean: Residual | None = None
    mean_bounds: tuple[int, int] = (0, 0)

    @abstractmethod
    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the run inside `x`, in place."""

    @abstractmethod
    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode the run inside `x`, in place of it what is decoded."""

    @abstractmethod
    def recode(self, x: Tensor, launch: Launch) -> None:
        """Make the residual what the exchange of the run inside `x`, used up, would have left."""


class CodedRuns(Channel):
    """Runs of matrices, each averaged in codes, and the small rest."""

    def __init__(self, runs: Sequence[CodedRun], small: SmallPart) -> None:
        self._runs = runs
        self._small = small

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of the runs: of the values sent, and of the means."""
        return coding_errors("residual", self._runs)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in place; all clusters decode the same bytes."""
        runs = [run.exchange(x, launch) for run in self._runs]
        yield from together(*runs, self._small.exchange(x, launch))
        return x

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Make the codes of a launch, and of `x`, in place, what is decoded of them."""
        for run in self._runs:
            run.encode(x, launch)
        self._small.encode(x, launch)

    def messages(self, launch: Launch) -> Mapping[str, Tensor]:
        """The codes of the runs, and of the small rest, slice by slice under their names."""
        means = {str(index): run.mean for index, run in enumerate(self._runs)}
        return {
            f"{name}.{index}": message
            for name, mean in (means | {"small": self._small.mean}).items()
            for index, message in enumerate(mean.messages(launch.round))
        }

    def can_recode(self, launch: Launch) -> bool:
        """Unless this cluster encodes means for all, whose residuals are made of others' codes."""
        return can_recode(self._runs)

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Encode the runs once more, for their residuals."""
        for run in self._runs:
            run.recode(x, launch)


def can_recode(runs: Sequence[CodedRun]) -> bool:
    """Whether residuals follow from what this cluster sends: none is of means."""
    return all(run.of_mean is None for run in runs)


def coding_errors(kind: str, runs: Sequence[CodedRun]) -> dict[str, CodingError]:
    """Return what runs keep of what coding lost, by name: of the values sent, and of the means."""
    named: dict[str, CodingError] = {}
    for index, run in enumerate(runs):
        name, start = f"{kind}.{index}", run.start
        if run.residual is not None:
            named[name] = CodingError(start, run.stop, run.residual)
        if run.of_mean is not None:
            first, last = run.mean_bounds
            named[f"{name}.mean"] = CodingError(start + first, start + last, run.of_mean, True)
    return named


class SmallPart:
    """The vectors and small matrices of a fragment: gathered, or by the owners of slices.

    Those send the mean in fp32, so that it is the same either way.
    """

    def __init__(self, wire: SmallWire, fragment: Fragment, seat: Seat, opening: Opening) -> None:
        self._ranges = fragment.small_runs
        numel = sum(stop - start for start, stop in self._ranges)
        self._values = opening.buffers.zeros(numel)
        self._encoded = opening.buffers.zeros(numel if opening.at_launch else 0)
        format, exact = FORMATS[wire](), FORMATS["fp32"]()
        self.mean = CodedMean(numel, format, exact, seat, opening=opening)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the small slots inside `x`, in place."""
        if not self._values.numel():
            return x
        self._take(x, self._values)
        yield from self.mean.exchange(self._values, number=launch.round)
        self._put(x, self._values)
        return x

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode the small slots inside `x`, in place of them what is decoded."""
        if self._encoded.numel():
            self._take(x, self._encoded)
            self.mean.encode(self._encoded, number=launch.round)
            self._put(x, self._encoded)

    def _take(self, x: Tensor, values: Tensor) -> None:
        for part, (start, stop) in zip(self._parts(values), self._ranges, strict=True):
            part.copy_(x[start:stop])

    def _put(self, x: Tensor, values: Tensor) -> None:
        for part, (start, stop) in zip(self._parts(values), self._ranges, strict=True):
            x[start:stop].copy_(part)

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        return values.split([stop - start for start, stop in self._ranges])
