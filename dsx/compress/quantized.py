"""Quantized averaging: a few bits per element, with error feedback if wanted.

The fragment's matrices travel in `wire`, in groups of `group_size` with one scale each; where
there are four clusters or more, their mean returns in `mean_wire` (see comm/reduce.py). Vectors
and small matrices travel beside them in `small_wire`, in the same messages: they are well under
1 % of the bytes and the part that coding hurts most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsx.compress.averaging import CodedMean, mean_bounds
from dsx.compress.base import Channel, CodingError, Launch
from dsx.compress.error_feedback import Residual, Storage, residual_bytes
from dsx.compress.wire.base import Kernels, Rounding, Wire
from dsx.compress.wire.formats import FORMATS
from dsx.core.checks import require_choice
from dsx.core.exchange import Exchange, Peers, together
from dsx.core.types import Fragment, Slot

Feedback = Literal["none", "fp32", "bf16", "int8"]
WireName = Literal["fp32", "bf16", "fp16", "int8", "int4", "fp8", "fp4_e2m1", "fp4_e3m0", "ternary"]
CASTS = ("fp32", "bf16", "fp16")
SmallWire = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Quantized:
    """Group-quantized codes; `error_feedback` names how the residual is stored, if there is one."""

    wire: WireName = "int4"
    group_size: int = 64
    rounding: Rounding = "nearest"
    mean_wire: WireName = "int8"
    small_wire: SmallWire = "bf16"
    error_feedback: Feedback = "none"
    feedback_decay: float = 1.0
    kernels: Kernels = "auto"

    is_exact = False
    captures_spectrum = False
    needs_whole_matrices = False

    def takes(self, slot: Slot) -> bool:
        """No parameter has to be whole: groups need no shape."""
        return False

    def validate(self) -> None:
        """Require known formats, sizes that they take, and a decay in (0, 1]."""
        require_choice("compression.wire", self.wire, WireName)
        require_choice("compression.mean_wire", self.mean_wire, WireName)
        require_choice("compression.small_wire", self.small_wire, SmallWire)
        require_choice("compression.error_feedback", self.error_feedback, Feedback)
        require_choice("compression.kernels", self.kernels, Kernels)
        if not 0 < self.feedback_decay <= 1:
            raise ValueError(
                f"compression.feedback_decay={self.feedback_decay} must be above 0 and at most 1; "
                "SparseLoCo uses 0.95, and 1 keeps everything"
            )
        if self.error_feedback == "none" and self.feedback_decay != 1:
            raise ValueError(
                f"compression.feedback_decay={self.feedback_decay} has no effect while "
                "compression.error_feedback='none'; name a storage, e.g. 'fp32', or leave it out"
            )
        if self.wire in (*CASTS, "ternary") and self.rounding != "nearest":
            raise ValueError(
                f"compression.rounding={self.rounding!r}: {self.wire} rounds to nearest only; "
                "leave rounding out"
            )
        if self.wire in CASTS and self.group_size != Quantized.group_size:
            raise ValueError(
                f"compression.group_size={self.group_size}: {self.wire} has no groups; leave it out"
            )
        if self.sends_exactly and self.error_feedback != "none":
            raise ValueError(
                f"compression.error_feedback={self.error_feedback!r}: fp32 loses nothing; leave it "
                "out, or choose a narrower compression.wire"
            )
        if self.kernels != "auto" and all(format in CASTS for format in self.coded_formats):
            raise ValueError(
                f"compression.kernels={self.kernels!r}: {self.wire} is a cast, of which there is "
                "one kind only; leave it out"
            )
        self.up.validate()
        self.down.validate()

    @property
    def sends_exactly(self) -> bool:
        """Whether what a cluster sends loses nothing."""
        return self.wire == "fp32"

    @property
    def coded_formats(self) -> tuple[str, ...]:
        """The formats of all but the small rest."""
        return self.wire, self.mean_wire

    @property
    def up(self) -> Wire:
        """The format of what clusters send."""
        return self._format(self.wire)

    @property
    def down(self) -> Wire:
        """The format of the mean that a slice's owner sends."""
        return FORMATS[self.mean_wire]()

    def open(self, fragment: Fragment, peers: Peers, max_rank: int) -> Channel:
        """Return the channel of one fragment."""
        return QuantizedChannel(self, fragment, peers)

    def state_bytes(self, fragment: Fragment, peers: Peers, max_rank: int) -> int:
        """Return what residuals take."""
        return sum(self._run_bytes(b - a, peers) for a, b in runs(fragment.layout))

    def _run_bytes(self, numel: int, peers: Peers, keeps_mean: bool = True) -> int:
        """Return what the residuals of one run take: of the values sent, and of the mean."""
        if self.error_feedback == "none":
            return 0
        first, last = self.mean_bounds(numel, peers) if keeps_mean else (0, 0)
        return sum(residual_bytes(n, self.error_feedback) for n in (numel, last - first))

    def mean_bounds(self, numel: int, peers: Peers) -> tuple[int, int]:
        """Return which elements of a run have a mean that this cluster encodes, with a loss."""
        return (0, 0) if self.down.is_exact else mean_bounds(numel, self.up, self.down, peers)

    def residual(self, numel: int) -> Residual | None:
        """Return a residual of `numel` elements, or None without error feedback."""
        if self.error_feedback == "none":
            return None
        storage: Storage = self.error_feedback
        return Residual(numel, storage, self.feedback_decay)

    def _format(self, name: WireName) -> Wire:
        kind: Any = FORMATS[name]
        fields = {"group_size": self.group_size, "rounding": self.rounding}
        return kind(**{f: v for f, v in fields.items() if f in kind.__dataclass_fields__})


class QuantizedChannel:
    """Runs of matrices, each one coded vector, and the small rest."""

    spectrum: Tensor | None = None

    def __init__(self, method: Quantized, fragment: Fragment, peers: Peers) -> None:
        self._parts = [
            CodedPart(method, start, stop, peers, seed=part_seed(fragment.id, index, peers))
            for index, (start, stop) in enumerate(runs(fragment.layout))
        ]
        self._small = SmallPart(method.small_wire, fragment.layout, peers)

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The residuals of the runs."""
        return {name: error.residual.stored for name, error in self.errors.items()}

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of the runs."""
        return coding_errors("residual", self._parts)

    def payload_bytes(self, launch: Launch) -> int:
        """Return the same for every round."""
        return sum(part.bytes_sent for part in self._parts) + self._small.bytes_sent

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
        peers: Peers,
        seed: int,
        keeps_mean: bool = True,
    ) -> None:
        self.start, self.stop = start, stop
        self._seed = seed
        self._mean = CodedMean(stop - start, method.up, method.down, peers, method.kernels)
        self.bytes_sent = self._mean.bytes_sent
        self.residual = method.residual(stop - start)
        self.mean_bounds = method.mean_bounds(stop - start, peers) if keeps_mean else (0, 0)
        first, last = self.mean_bounds
        self.of_mean = method.residual(last - first) if last > first else None

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

    def __init__(self, wire: SmallWire, layout: Sequence[Slot], peers: Peers) -> None:
        self._ranges = merged([(s.offset, s.offset + s.numel) for s in layout if s.is_small])
        numel = sum(stop - start for start, stop in self._ranges)
        self._values = torch.zeros(numel)
        format = FORMATS[wire]()
        self._mean = CodedMean(numel, format, format, peers, is_gathered=True)
        self.bytes_sent = self._mean.bytes_sent

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


def runs(layout: Sequence[Slot]) -> list[tuple[int, int]]:
    """Return `(start, stop)` of what is coded, neighbours as one."""
    return merged([(s.offset, s.offset + s.numel) for s in layout if not s.is_small])


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending ranges with neighbours joined, empty ones left out."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return [r for r in found if r[1] > r[0]]


def part_seed(fragment: int, part: int, peers: Peers) -> int:
    """Return what tells the noise of one part and cluster from the others'."""
    return (fragment * 1_009 + part) * 4_099 + peers.cluster_id * 31
