"""Top-k averaging: of each chunk the few largest entries, in 14 bits each, with error feedback.

Source: SparseLoCo (arXiv:2508.15706): 64 entries of every 4096 as 12-bit indices and 2-bit values,
0.223 bits per element with the scales; what is not sent stays in a residual that decays by 0.95.
There that residual takes the place of outer momentum: outer_optimizer {"type": "sgd", "lr": 1.0}.

    x = D + decay * e;    e = x - decoded(codes of x);    mean = sum_k decoded_k / C

A message goes to all clusters, for any C; everybody decodes all of them, its own too, in cluster
order, so all apply the same bits. It holds the indices of all chunks, two in three bytes; the
values, four in a byte; the scales, bf16. A short last chunk keeps min(k, its length) entries.

Values lie on the grid -1.5 s, -s, s, 1.5 s (nothing kept is near zero), and s and the choice of
what becomes 1.5 s are the best there are in least squares, see `two_levels`. So |x|^2 = |decoded|^2
+ |e|^2 but for the rounding of s to bf16: what is sent is never too long. The ratio 1.5 leaves 1 %
of the kept energy of normal and Laplace chunks and 15 % of Student's t with 3 degrees (2: 1, 2 and
11 %; 3: 1, 3 and 10 %), where 60 to 90 % of all energy is not kept. Deviations: the authors' code
decodes four bins over six standard deviations by a table of means per tensor (as we read it: 1, 4
and 34 %); its chunks are 64 x 64 tiles, ours stretches of a run of matrices, as shards are flat.

Of equal magnitudes at the edge torch.topk keeps any: always the same ones on one platform, maybe
others on the next. Only the encoder has to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from dsx.compress.base import Channel, Compressor, Launch
from dsx.compress.quantized import (
    Decay,
    SmallWire,
    residual_formats,
    residual_work,
    small_bytes,
    small_rounds,
    small_work,
)
from dsx.compress.slices import Rounds, coded_sizes, gathered_rounds, most_work, side_by_side
from dsx.compress.wire.base import Codec, Kernels
from dsx.compress.wire.formats import FORMATS, Storage
from dsx.core.buffers import Opening
from dsx.core.checks import require_bounds, require_choice
from dsx.core.membership import Seat
from dsx.core.registry import register
from dsx.core.types import Fragment

if TYPE_CHECKING:
    import torch

    from dsx.core.buffers import Buffers

LARGEST_CHUNK = 4096  # what 12 bits count
Bits = Literal[2]


@register("compression", "top_k")
@dataclass(frozen=True)
class TopK(Compressor):
    """The `k` largest of every `chunk` elements; the others are kept, to be sent later.

    Without a residual most of a pseudo-gradient would never arrive, so there is always one.
    """

    k: Annotated[int, Ge(1)] = 64
    """How many values of every chunk are sent, at least 1."""
    chunk: Annotated[
        int, Ge(1), Le(LARGEST_CHUNK), f"a 12-bit index reaches no further; try {LARGEST_CHUNK}"
    ] = LARGEST_CHUNK
    """The elements of one chunk, from 1 to 4096."""
    bits: Bits = 2
    """The bits of each value, beside the 12 of its index."""
    small_wire: SmallWire = "bf16"
    """The format of vectors and small matrices, which coding hurts most."""
    error_feedback: Storage = "fp32"
    """How what has not been sent is kept to be sent later."""
    feedback_decay: Decay = 0.95
    """The share of what was not sent that is kept each round, above 0 and at most 1."""

    encodes_at_launch = True

    def validate(self) -> None:
        """Require indices of 12 bits, at least one value a chunk, and a decay in (0, 1]."""
        require_bounds("compression", self)
        if self.k > self.chunk:
            raise ValueError(
                f"compression.k={self.k} must be at most chunk={self.chunk}; try "
                f"{max(1, self.chunk // 64)}, a 64th of it"
            )
        require_choice("compression.bits", self.bits, Bits)
        require_choice("compression.small_wire", self.small_wire, SmallWire)
        require_choice("compression.error_feedback", self.error_feedback, Storage)

    @property
    def format(self) -> SparseFormat:
        """The format of what clusters send."""
        return SparseFormat(self.k, self.chunk)

    def open(
        self, fragment: Fragment, seat: Seat, max_rank: int, opening: Opening | None = None
    ) -> Channel:
        """Return the channel of one fragment."""
        from dsx.compress.top_k_channel import TopKChannel

        return TopKChannel(self, fragment, seat, opening or Opening())

    def traffic(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> Rounds:
        """Return those of the runs, each message to all, and of the small rest beside them."""
        runs = [gathered_rounds(b - a, self.format, num_clusters) for a, b in fragment.coded_runs]
        return side_by_side([*runs, small_rounds(fragment, self.small_wire, num_clusters)])

    def state_bytes(self, fragment: Fragment, num_clusters: int, max_rank: int) -> list[int]:
        """Return what residuals take."""
        storage = FORMATS[self.error_feedback]()
        return [sum(storage.num_bytes(b - a) for a, b in fragment.coded_runs)] * num_clusters

    def buffer_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what messages and work space take."""
        form, storage = self.format, residual_formats(self.error_feedback)
        lengths = [b - a for a, b in fragment.coded_runs]
        size = 0
        for length in lengths:
            sizes = coded_sizes(length, form, form, num_clusters, 0, is_gathered=True)
            size += sizes.num_bytes(num_clusters, at_launch)
        encoders = [kind.work(n) for n in lengths for kind in (form, *storage)]
        size += most_work([*encoders, small_work(fragment, self.small_wire)])
        if at_launch:  # the encoder's, on its own thread
            size += most_work(encoders)
        beside = small_bytes(fragment, self.small_wire, num_clusters, at_launch)
        return (beside + size).tolist()

    def shared_work_bytes(self, fragment: Fragment) -> int:
        """Return what the longest residual takes in fp32, if it is stored in less."""
        return residual_work(self.error_feedback, fragment)


@dataclass(frozen=True)
class SparseFormat:
    """The `Wire` of one run."""

    k: int
    chunk: int

    name = "top_k"
    is_exact = False

    @property
    def granularity(self) -> int:
        """Elements of a chunk."""
        return self.chunk

    def validate(self) -> None:
        """Nothing that `TopK` has not checked."""

    def num_kept(self, numel: int) -> int:
        """Return how many of `numel` elements are sent."""
        full, rest = divmod(numel, self.chunk)
        return full * self.k + self.num_kept_of(rest)

    def num_kept_of(self, length: int) -> int:
        """Return how many of a chunk of that length are sent."""
        return min(self.k, length)

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message of `numel` elements."""
        return sum(self.section_bytes(numel))

    def section_bytes(self, numel: int) -> tuple[int, int, int]:
        """Return the sizes of indices, values and scales."""
        kept = self.num_kept(numel)
        return -(-3 * kept // 2), -(-kept // 4), 2 * -(-numel // self.chunk)

    def work(self, numel: int, kernels: Kernels = "auto") -> Mapping[str, int]:
        """Return what the codec works in, by role: what is kept, and the scales."""
        kept = self.num_kept(numel)
        sections = {"indices": 8 * kept, "kept": 4 * kept, "codes of entries": kept}
        return sections | {"scales": 2 * -(-numel // self.chunk)}

    def codec(
        self,
        numel: int,
        device: torch.device,
        kernels: Kernels = "auto",
        buffers: Buffers | None = None,
    ) -> Codec:
        """Return a codec for vectors of up to `numel` elements on `device`."""
        from dsx.compress.top_k_channel import SparseCodec

        return SparseCodec(self, numel, device, kernels, buffers)
