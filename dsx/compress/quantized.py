"""Quantized averaging: a few bits per element, with error feedback if wanted.

The fragment's matrices travel in `wire`, in groups of `group_size` with one scale each; where
there are four clusters or more, their mean returns in `mean_wire` (see averaging.py). Vectors
and small matrices travel beside them in `small_wire`, in the same messages: they are well under
1 % of the bytes and the part that coding hurts most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, Le

from dsx.compress.base import Channel, Compressor, Launch
from dsx.compress.slices import (
    Rounds,
    Sizes,
    coded_bytes,
    coded_rounds,
    mean_bounds,
    mean_lengths,
    most_work,
    of_lengths,
    side_by_side,
)
from dsx.compress.wire.base import Kernels, Rounding, Wire
from dsx.compress.wire.formats import FORMATS, decoding_work, is_made_in_place
from dsx.core.buffers import Opening
from dsx.core.checks import require_bounds, require_choice
from dsx.core.membership import Seat
from dsx.core.registry import register
from dsx.core.types import Fragment

Feedback = Literal["none", "fp32", "bf16", "int8"]
MeanFeedback = Literal["none", "fp32"]
WireName = Literal[
    "fp32", "bf16", "fp16", "int8", "int4", "fp8", "fp4_e2m1", "fp4_e3m0",
    "ternary", "3bit", "2bit", "1bit",
]  # fmt: skip
CASTS = ("fp32", "bf16", "fp16")
FINE = {*CASTS, "int8", "fp8", "int4"}  # identical clusters: cosine of 0.95 to 1.05
NARROW = ("3bit", "2bit", "1bit")  # a mean loses 3 to 36 % of its energy in these
SmallWire = Literal["fp32", "bf16", "fp16"]
Decay = Annotated[float, Gt(0), Le(1), "SparseLoCo uses 0.95, and 1 keeps everything"]


@register("compression", "quantized")
@dataclass(frozen=True)
class Quantized(Compressor):
    """A few bits per element, in groups that share a scale."""

    wire: WireName = "int4"
    """The format of what a cluster sends."""
    group_size: int = 64
    """The elements that share a scale; formats without groups (fp32, bf16, fp16) take none."""
    rounding: Rounding = "nearest"
    """How values are rounded to codes: to the nearest, or at random without a bias."""
    mean_wire: WireName = "int8"
    """The format in which means return, where there are four clusters or more."""
    small_wire: SmallWire = "bf16"
    """The format of vectors and small matrices, which coding hurts most."""
    error_feedback: Feedback = "none"
    """How what coding lost is kept to be sent later; none: it is lost."""
    feedback_decay: Decay = 1.0
    """The share of what was lost that is kept each round, above 0 and at most 1."""
    mean_feedback: MeanFeedback | None = None
    """How the owner of a slice keeps what coding its mean lost, where there are four clusters or
    more; null: as `error_feedback`, and where that is none, in fp32 for a `mean_wire` of 3 bits or
    fewer."""
    kernels: Kernels = "auto"
    """How codes are computed: by the C kernels of the installation (native), by kernels that
    torch.compile makes at the first transfer (compiled), or by plain tensor operations (eager);
    auto: the first of these that is there, compiled ones for 16 Mi elements or more."""

    encodes_at_launch = True

    def validate(self) -> None:
        """Require known formats, sizes that they take, and a decay in (0, 1]."""
        require_choice("compression.wire", self.wire, WireName)
        require_choice("compression.mean_wire", self.mean_wire, WireName)
        require_choice("compression.small_wire", self.small_wire, SmallWire)
        require_choice("compression.error_feedback", self.error_feedback, Feedback)
        if self.mean_feedback is not None:
            require_choice("compression.mean_feedback", self.mean_feedback, MeanFeedback)
        require_choice("compression.kernels", self.kernels, Kernels)
        require_bounds("compression", self)
        if self.error_feedback == "none" and self.feedback_decay != 1:
            raise ValueError(
                f"compression.feedback_decay={self.feedback_decay} has no effect while "
                "compression.error_feedback='none'; name a storage, e.g. 'fp32', or leave it out"
            )
        if self.down.is_exact and self.mean_feedback == "fp32":
            raise ValueError(
                "compression.mean_feedback='fp32': a mean in fp32 loses nothing; "
                "leave it out, or choose a narrower compression.mean_wire"
            )
        if self.wire in (*CASTS, "ternary", *NARROW) and self.rounding != "nearest":
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
    def is_fine(self) -> bool:
        """Whether formats both ways are casts, of 8 bits, or int4: small floats of 4 are not."""
        return {self.wire, self.mean_wire} <= FINE

    @property
    def sends_exactly(self) -> bool:
        """Whether what a cluster sends loses nothing."""
        return self.wire == "fp32"

    @property
    def coded_formats(self) -> tuple[str, ...]:
        """The formats of all but the small rest."""
        return self.wire, self.mean_wire

    @property
    def kept_of_means(self) -> Feedback:
        """How owners keep what coding a mean has lost: `mean_feedback`, or what that stands for."""
        if self.mean_feedback is not None:
            return self.mean_feedback
        if self.error_feedback == "none" and self.mean_wire in NARROW:
            return "fp32"
        return self.error_feedback

    @property
    def up(self) -> Wire:
        """The format of what clusters send."""
        return self._format(self.wire)

    @property
    def down(self) -> Wire:
        """The format of the mean that a slice's owner sends."""
        return FORMATS[self.mean_wire]()

    def open(
        self, fragment: Fragment, seat: Seat, max_rank: int, opening: Opening | None = None
    ) -> Channel:
        """Return the channel of one fragment."""
        from dsx.compress.quantized_channel import QuantizedChannel

        return QuantizedChannel(self, fragment, seat, opening or Opening())

    def traffic(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> Rounds:
        """Return those of the runs, and of the small rest beside them."""
        return self.coded_traffic(fragment, fragment.coded_runs, num_clusters)

    def coded_traffic(
        self,
        fragment: Fragment,
        runs: Sequence[tuple[int, int]],
        num_clusters: int,
        beside: Sequence[Rounds] = (),
    ) -> Rounds:
        """Return the rounds of some runs and the small rest, with others `beside` them."""
        up, down = self.up, self.down
        coded = [coded_rounds(b - a, up, down, num_clusters) for a, b in runs]
        small = small_rounds(fragment, self.small_wire, num_clusters)
        return side_by_side([*coded, small, *beside])

    def state_bytes(self, fragment: Fragment, num_clusters: int, max_rank: int) -> list[int]:
        """Return what residuals take."""
        return self.residual_bytes(fragment.coded_runs, num_clusters).tolist()

    def before_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what copies of residuals take; of those of means alone, if coded at the launch."""
        if not at_launch:
            return self.state_bytes(fragment, num_clusters, max_rank)
        runs = fragment.coded_runs
        return self.residual_bytes(runs, num_clusters, keeps_values=False).tolist()

    def residual_bytes(
        self,
        runs: Sequence[tuple[int, int]],
        num_clusters: int,
        keeps_mean: bool = True,
        keeps_values: bool = True,
    ) -> Sizes:
        """Return what the residuals of runs take: of the values sent, and of each one's means."""
        storage = self.error_feedback if keeps_values else "none"
        of_means = self.kept_of_means if keeps_mean else "none"
        kept = np.zeros(num_clusters, dtype=np.int64)
        for start, stop in runs:
            kept += _stored_bytes(storage, stop - start)
            if of_means != "none" and not self.down.is_exact:
                means = mean_lengths(stop - start, self.up, self.down, num_clusters)
                kept += of_lengths(means, FORMATS[of_means]().num_bytes)
        return kept

    def buffer_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what messages and work space take."""
        runs = fragment.coded_runs
        small = small_work(fragment, self.small_wire)
        work = most_work([*self.coded_work(runs, bool(at_launch)), small])
        if at_launch:  # the encoder's, on its own thread
            work += most_work(self.encoder_work(runs))
        beside = small_bytes(fragment, self.small_wire, num_clusters, at_launch)
        return (self.message_bytes(runs, num_clusters, at_launch) + beside + work).tolist()

    def shared_work_bytes(self, fragment: Fragment) -> int:
        """Return what the longest residual takes in fp32, if it is stored in less, and fades."""
        if is_made_in_place(self.error_feedback, self.feedback_decay):
            return 0
        return residual_work(self.error_feedback, fragment)

    def message_bytes(
        self, runs: Sequence[tuple[int, int]], num_clusters: int, at_launch: int = 0
    ) -> Sizes:
        """Return what the messages of coded runs take at each cluster."""
        up, down = self.up, self.down
        total = np.zeros(num_clusters, dtype=np.int64)
        for a, b in runs:
            total += coded_bytes(b - a, up, down, num_clusters, at_launch)
        return total

    def coded_work(
        self, runs: Sequence[tuple[int, int]], only_decodes: bool = False
    ) -> list[Mapping[str, int]]:
        """Return what the codecs of runs work in; of what is sent, maybe only to decode it."""
        own = [
            decoding_work(self.up, b - a, self.kernels)
            if only_decodes
            else self.up.work(b - a, self.kernels)
            for a, b in runs
        ]
        means = [self.down.work(b - a, self.kernels) for a, b in runs]
        return [*own, *means, *self.storage_work(runs)]

    def encoder_work(self, runs: Sequence[tuple[int, int]]) -> list[Mapping[str, int]]:
        """Return what those work in that encode runs, with what residuals are stored by."""
        own = [self.up.work(b - a, self.kernels) for a, b in runs]
        return [*own, *self.storage_work(runs)]

    def storage_work(self, runs: Sequence[tuple[int, int]]) -> list[Mapping[str, int]]:
        """Return what those work in that store the residuals of runs, and add them to values."""
        storage, forms = self.error_feedback, residual_formats(self.error_feedback)
        if is_made_in_place(storage, self.feedback_decay):
            forms = [FORMATS[storage]()]
        return [form.work(b - a) for a, b in runs for form in forms]

    def mean_bounds(
        self, numel: int, num_clusters: int, num_slices: int | None = None
    ) -> list[tuple[int, int]]:
        """Return which elements of a run have a mean that each cluster encodes, with a loss."""
        if self.down.is_exact:
            return [(0, 0)] * num_clusters
        return mean_bounds(numel, self.up, self.down, num_clusters, num_slices)

    def _format(self, name: WireName) -> Wire:
        kind: Any = FORMATS[name]
        fields = {"group_size": self.group_size, "rounding": self.rounding}
        return kind(**{f: v for f, v in fields.items() if f in kind.__dataclass_fields__})


def _stored_bytes(storage: Feedback, numel: int) -> int:
    return 0 if storage == "none" else FORMATS[storage]().num_bytes(numel)


def small_rounds(fragment: Fragment, wire: SmallWire, num_clusters: int) -> Rounds:
    """Return what the vectors and small matrices of a fragment take; of owners, in fp32."""
    numel = sum(stop - start for start, stop in fragment.small_runs)
    return coded_rounds(numel, FORMATS[wire](), FORMATS["fp32"](), num_clusters)


def small_bytes(
    fragment: Fragment, wire: SmallWire, num_clusters: int, at_launch: int = 0
) -> Sizes:
    """Return what the small rest takes: its values, once more at the launch, and messages."""
    numel = sum(stop - start for start, stop in fragment.small_runs)
    messages = coded_bytes(numel, FORMATS[wire](), FORMATS["fp32"](), num_clusters, at_launch)
    return 4 * numel * (2 if at_launch else 1) + messages


def residual_work(storage: Feedback, fragment: Fragment) -> int:
    """Return what the longest of a fragment's residuals takes while it is in fp32, if shortened."""
    longest = max((b - a for a, b in fragment.coded_runs), default=0)
    return 0 if storage in ("none", "fp32") else 4 * longest


def residual_formats(storage: Feedback) -> list[Wire]:
    """Return the format whose codec stores residuals in work space, if there is one: no cast."""
    return [] if storage in ("none", *CASTS) else [FORMATS[storage]()]


def small_work(fragment: Fragment, wire: SmallWire) -> Mapping[str, int]:
    """Return what the small rest's codec works in."""
    return FORMATS[wire]().work(sum(stop - start for start, stop in fragment.small_runs))
