"""The channel of `Quantized`, and the parts that others are made of: coded runs, the small rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

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
    from dsx.compress.quantized import Quantized, SmallWire


class QuantizedChannel(Channel):
    """Runs of matrices, each one coded vector, and the small rest."""

    def __init__(self, method: Quantized, fragment: Fragment, seat: Seat, opening: Opening) -> None:
        self._parts = [
            CodedPart(
                method, start, stop, seat,
                seed=part_seed(fragment.id, index, seat), opening=opening,
            )
            for index, (start, stop) in enumerate(fragment.coded_runs)
        ]  # fmt: skip
        self._small = SmallPart(method.small_wire, fragment, seat, opening)

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of the runs."""
        return coding_errors("residual", self._parts)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in place; all clusters decode the same bytes."""
        parts = [part.exchange(x, launch) for part in self._parts]
        yield from together(*parts, self._small.exchange(x, launch))
        return x

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Make the codes of a launch, and of `x`, in place, what is decoded of them."""
        for part in self._parts:
            part.encode(x, launch)
        self._small.encode(x, launch)

    def messages(self, launch: Launch) -> Mapping[str, Tensor]:
        """The codes of the runs, and of the small rest."""
        means = {str(index): part.mean for index, part in enumerate(self._parts)}
        return named_messages({**means, "small": self._small.mean}, launch)

    def can_recode(self, launch: Launch) -> bool:
        """Unless this cluster encodes means for all, whose residuals are made of others' codes."""
        return can_recode(self._parts)

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Encode the runs once more, for their residuals."""
        for part in self._parts:
            part.recode(x, launch)


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
        opening: Opening | None = None,
    ) -> None:
        self.start, self.stop = start, stop
        self._seed = seed
        opening = opening or Opening()
        self.mean = CodedMean(
            stop - start, method.up, method.down, seat, method.kernels, opening=opening
        )
        self.residual = _residual(method, stop - start, opening)
        bounds = method.mean_bounds(stop - start, seat.num_clusters)[seat.position]
        self.mean_bounds = first, last = bounds if keeps_mean else (0, 0)
        here = replace(opening, at_launch=0)  # means are encoded by the transfer's thread
        self.of_mean = _residual(method, last - first, here) if last > first else None

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the run inside `x`, in place."""
        run, seed = x[self.start : self.stop], self._seed_of(launch)
        return self.mean.exchange(run, self.residual, seed, self.of_mean, launch.round)

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode the run inside `x`, in place of it what is decoded."""
        run, seed = x[self.start : self.stop], self._seed_of(launch)
        self.mean.encode(run, self.residual, seed, launch.round)

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Make the residual what the exchange of the run inside `x`, used up, would have left."""
        run, seed = x[self.start : self.stop], self._seed_of(launch)
        self.mean.recode(run, self.residual, seed)

    def add_residual(self, x: Tensor) -> None:
        """Add what was lost before to the run inside `x`; low-rank rounds then replace it."""
        if self.residual is not None:
            with self.residual.opened() as residual:
                x[self.start : self.stop].add_(residual)

    def _seed_of(self, launch: Launch) -> int:
        return self._seed + 1_000_003 * launch.round


def can_recode(parts: Sequence[CodedPart]) -> bool:
    """Whether residuals follow from what this cluster sends: none is of means."""
    return all(part.of_mean is None for part in parts)


def named_messages(means: Mapping[str, CodedMean], launch: Launch) -> dict[str, Tensor]:
    """Return the codes of a launch, slice by slice, under the names of what they are of."""
    return {
        f"{name}.{index}": message
        for name, mean in means.items()
        for index, message in enumerate(mean.messages(launch.round))
    }


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

    def __init__(self, wire: SmallWire, fragment: Fragment, seat: Seat, opening: Opening) -> None:
        self._ranges = fragment.small_runs
        numel = sum(stop - start for start, stop in self._ranges)
        self._values = opening.buffers.zeros(numel)
        self._encoded = opening.buffers.zeros(numel if opening.at_launch else 0)
        format = FORMATS[wire]()
        self.mean = CodedMean(numel, format, format, seat, is_gathered=True, opening=opening)

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


def part_seed(fragment: int, part: int, seat: Seat) -> int:
    """Return what tells the noise of one part and cluster from the others'."""
    return (fragment * 1_009 + part) * 4_099 + seat.cluster_id * 31


def _residual(method: Quantized, numel: int, opening: Opening) -> Residual | None:
    """Return a residual of `numel` elements, or None without error feedback."""
    if method.error_feedback == "none":
        return None
    return Residual(numel, method.error_feedback, method.feedback_decay, opening)
