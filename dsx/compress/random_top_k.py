"""Random selection, top-k of it, int4: what CocktailSGD sends, position by position.

Source: CocktailSGD (Wang et al., ICML 2023). Of every 1 / `random_ratio` elements one is picked at
random, the same ones in all clusters, from the fragment and the round alone: no index of these is
sent and nothing has to be remembered. Of the picked the `top_k_ratio` largest travel, with their
places among the picked and 4 bits each. What is not sent is to be sent later: of a cluster by a
residual here or in its local parameters (delay/shift.py, the published form), of means by
a residual of the owner (the published server's error).

    x = D + e;    picked = x[positions];    e = x - decoded(codes of picked), zeros elsewhere

A message holds, of every `chunk` picked elements, the places of the kept ones, 12 bits each or one
bit for each picked one, whichever takes less; then the values, int4 with a scale for each
`group_size`. From four clusters on the mean of a slice is picked anew from what its owner has
decoded and what it kept before, and sent back in the same format (averaging.py).

Deviations: the authors' largest are those of a whole slice, ours of every 4096 picked elements,
which bounds the memory of the selection; their grid of 4 bits is -8 .. 7, ours -7 .. 7; they pick
by a pattern that rolls by one each round, a permutation, or with replacement. With up to three
clusters all gather all codes, so means are not coded again, and less is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from dsx.compress.base import Channel, Compressor, Launch
from dsx.compress.quantized import (
    Decay,
    Feedback,
    SmallWire,
    residual_formats,
    residual_work,
    small_bytes,
    small_rounds,
    small_work,
)
from dsx.compress.slices import (
    Rounds,
    coded_bytes,
    coded_rounds,
    mean_bounds,
    most_work,
    of_lengths,
    side_by_side,
)
from dsx.compress.wire.base import TILE, Codec, Kernels
from dsx.compress.wire.formats import FORMATS, Int4, Storage
from dsx.core.buffers import Opening
from dsx.core.checks import require_bounds, require_choice
from dsx.core.membership import Seat
from dsx.core.registry import register
from dsx.core.types import Fragment

if TYPE_CHECKING:
    import torch

    from dsx.core.buffers import Buffers

LARGEST_CHUNK = 4096  # what 12 bits count
GroupSize = Literal[32, 64, 128, 256]
Share = Annotated[float, Gt(0), Le(1)]


@register("compression", "random_top_k")
@dataclass(frozen=True)
class RandomTopK(Compressor):
    """The largest of randomly picked elements, in int4: CocktailSGD's three compressions."""

    random_ratio: Share = 0.1
    """The share of elements that is picked at random each round, above 0 and at most 1; the same
    ones in all clusters."""
    top_k_ratio: Share = 0.08
    """The share of the picked ones that is sent, the largest, above 0 and at most 1."""
    chunk: Annotated[
        int, Ge(1), Le(LARGEST_CHUNK), f"a 12-bit index reaches no further; try {LARGEST_CHUNK}"
    ] = LARGEST_CHUNK
    """The picked elements among which the largest are sought, from 1 to 4096."""
    group_size: GroupSize = 128
    """The values sent that share a scale."""
    small_wire: SmallWire = "bf16"
    """The format of vectors and small matrices, which coding hurts most."""
    error_feedback: Feedback = "fp32"
    """How what has not been sent is kept to be sent later, and what coding a mean loses, too; none:
    the local parameters keep it (delay.type shift), and owners keep that of means in fp32.
    """
    feedback_decay: Decay = 1.0
    """The share of what was not sent that is kept each round, above 0 and at most 1."""

    encodes_at_launch = True

    @property
    def needs_feedback(self) -> bool:
        """Always: of 1000 values some 8 are sent."""
        return True

    def validate(self) -> None:
        """Require shares in (0, 1], indices of 12 bits, known formats and a decay in (0, 1]."""
        require_bounds("compression", self)
        require_choice("compression.group_size", self.group_size, GroupSize)
        require_choice("compression.small_wire", self.small_wire, SmallWire)
        require_choice("compression.error_feedback", self.error_feedback, Feedback)
        if self.error_feedback == "none" and self.feedback_decay != 1:
            raise ValueError(
                f"compression.feedback_decay={self.feedback_decay} has no effect while "
                "compression.error_feedback='none'; name a storage, e.g. 'fp32', or leave it out"
            )

    @property
    def format(self) -> PickedFormat:
        """The format of what is sent of picked elements."""
        return PickedFormat(self.top_k_ratio, self.chunk, self.group_size)

    @property
    def mean_feedback(self) -> Storage:
        """How owners keep what coding a mean has lost, where there are four clusters or more."""
        return "fp32" if self.error_feedback == "none" else self.error_feedback

    def num_picked(self, numel: int) -> int:
        """Return how many of `numel` elements are picked each round."""
        return min(numel, max(1, int(self.random_ratio * numel))) if numel else 0

    def mean_bounds(
        self, numel: int, num_clusters: int, num_slices: int | None = None
    ) -> list[tuple[int, int]]:
        """Return which elements of a run each cluster may encode a mean of: of its picked ones."""
        picked, form = self.num_picked(numel), self.format
        return [
            (stretch_start(a, numel, picked), stretch_start(b, numel, picked))
            for a, b in mean_bounds(picked, form, form, num_clusters, num_slices)
        ]

    def open(
        self, fragment: Fragment, seat: Seat, max_rank: int, opening: Opening | None = None
    ) -> Channel:
        """Return the channel of one fragment."""
        from dsx.compress.random_top_k_channel import RandomTopKChannel

        return RandomTopKChannel(self, fragment, seat, opening or Opening())

    def traffic(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> Rounds:
        """Return those of the runs, and of the small rest beside them."""
        form = self.format
        runs = [
            coded_rounds(self.num_picked(b - a), form, form, num_clusters)
            for a, b in fragment.coded_runs
        ]
        return side_by_side([*runs, small_rounds(fragment, self.small_wire, num_clusters)])

    def state_bytes(self, fragment: Fragment, num_clusters: int, max_rank: int) -> list[int]:
        """Return what residuals take, of values and of means."""
        of_means = self.before_bytes(fragment, num_clusters, max_rank, at_launch=1)
        if self.error_feedback == "none":
            return of_means
        storage = FORMATS[self.error_feedback]()
        of_values = sum(storage.num_bytes(b - a) for a, b in fragment.coded_runs)
        return [of_values + size for size in of_means]

    def before_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what copies of residuals take; of those of means alone, if coded at the launch."""
        if not at_launch:
            return self.state_bytes(fragment, num_clusters, max_rank)
        storage, kept = FORMATS[self.mean_feedback](), np.zeros(num_clusters, dtype=np.int64)
        for start, stop in fragment.coded_runs:
            bounds = np.array(self.mean_bounds(stop - start, num_clusters))
            kept += of_lengths(np.diff(bounds)[:, 0], storage.num_bytes)
        return kept.tolist()

    def buffer_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what messages, picked elements and work space take."""
        form, runs = self.format, [self.num_picked(b - a) for a, b in fragment.coded_runs]
        encoders = [
            *(self._encoder_work(n) for n in runs),
            *(
                kind.work(b - a)
                for kind in residual_formats(self.error_feedback)
                for a, b in fragment.coded_runs
            ),
        ]
        beside = [small_work(fragment, self.small_wire)]
        for count in runs:  # where means are coded again: of a slice
            bounds = mean_bounds(count, form, form, num_clusters)
            longest = max(stop - start for start, stop in bounds)
            beside.append(form.work(longest) | {"lost": 4 * longest} if longest else {})
        if at_launch:  # the encoder's, on its own thread
            work = most_work(encoders)
            work += most_work([*beside, *(form.decoder_work(n) | picking_work(n) for n in runs)])
        else:
            work = most_work([*beside, *encoders])
        work += sum(runs) * PICKED_BYTES * (2 if at_launch else 1)
        total = small_bytes(fragment, self.small_wire, num_clusters, at_launch) + work
        for n in runs:
            total += coded_bytes(n, form, form, num_clusters, at_launch)
        return total.tolist()

    def _encoder_work(self, num_picked: int) -> Mapping[str, int]:
        """Return what picking and encoding a run work in, by role."""
        lost = {} if self.error_feedback == "none" else {"lost": 4 * num_picked}
        return self.format.work(num_picked) | picking_work(num_picked) | lost

    def shared_work_bytes(self, fragment: Fragment) -> int:
        """Return what the longest residual takes in fp32, if it is stored in less."""
        return residual_work(self.error_feedback, fragment)


PICKED_BYTES = 8 + 4  # a position and a value


def stretch_start(index: int, numel: int, num_picked: int) -> int:
    """Return where the elements begin of which one is the picked one of that index.

    The first ones are numel // num_picked long, the rest one longer.
    """
    if not num_picked:
        return 0
    length, longer = divmod(numel, num_picked)
    return index * length + max(0, index - (num_picked - longer))


def picking_work(num_picked: int) -> dict[str, int]:
    """Return what the random selection works in, by role: over a tile."""
    return dict.fromkeys(("noise", "bits", "high"), 4 * min(num_picked, TILE))


@dataclass(frozen=True)
class PickedFormat:
    """The `Wire` of picked elements: the largest of every chunk, their places and int4 values."""

    ratio: float
    chunk: int
    group_size: int

    name = "random_top_k"
    is_exact = False

    @property
    def granularity(self) -> int:
        """Elements of a chunk."""
        return self.chunk

    @property
    def values(self) -> Int4:
        """The format of the values."""
        return Int4(self.group_size)

    def validate(self) -> None:
        """Nothing that `RandomTopK` has not checked."""

    def num_kept_of(self, length: int) -> int:
        """Return how many of a chunk of that length are sent: one at least."""
        return max(1, int(self.ratio * length)) if length else 0

    def num_kept(self, numel: int) -> int:
        """Return how many of `numel` elements are sent."""
        full, rest = divmod(numel, self.chunk)
        return full * self.num_kept_of(self.chunk) + self.num_kept_of(rest)

    def has_bit_mask(self, numel: int) -> bool:
        """Whether places travel as a bit of each element: where 12 bits of each kept take more."""
        return -(-numel // 8) < -(-3 * self.num_kept(numel) // 2)

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message of `numel` elements."""
        return sum(self.section_bytes(numel))

    def section_bytes(self, numel: int) -> tuple[int, int]:
        """Return the sizes of places and values."""
        kept = self.num_kept(numel)
        places = -(-numel // 8) if self.has_bit_mask(numel) else -(-3 * kept // 2)
        return places, self.values.num_bytes(kept)

    def work(self, numel: int, kernels: Kernels = "auto") -> dict[str, int]:
        """Return what the codec works in, by role: magnitudes, places, and what decoding takes."""
        encoding = {"magnitudes": 4 * numel, "places": 8 * self.num_kept(numel)}
        return encoding | self.decoder_work(numel, kernels)

    def decoder_work(self, numel: int, kernels: Kernels = "auto") -> dict[str, int]:
        """Return what the codec works in where it decodes alone: values, and int4's."""
        kept = self.num_kept(numel)
        return {"kept": 4 * kept, **self.values.work(kept, kernels)}

    def codec(
        self,
        numel: int,
        device: torch.device,
        kernels: Kernels = "auto",
        buffers: Buffers | None = None,
    ) -> Codec:
        """Return a codec for vectors of up to `numel` elements on `device`."""
        from dsx.compress.random_top_k_codec import PickedCodec

        return PickedCodec(self, numel, device, kernels, buffers)
