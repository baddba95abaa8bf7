"""The channel of `TopK`, and the codec of its sparse messages; top_k.py says what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.compress.averaging import CodedMean
from dsx.compress.base import Launch
from dsx.compress.chunks import ChunkCodec, pack_indices, unpack_indices
from dsx.compress.coded_runs import CodedRun, CodedRuns, SmallPart
from dsx.compress.error_feedback import Residual
from dsx.compress.wire.base import Kernels
from dsx.compress.wire.group_format import largest_scale
from dsx.compress.wire.mean_kernels import MIN_SCALE
from dsx.core.buffers import Buffers, Opening
from dsx.core.checks import require_choice
from dsx.core.exchange import Exchange
from dsx.core.membership import Seat
from dsx.core.types import Fragment

if TYPE_CHECKING:
    from dsx.compress.top_k import SparseFormat, TopK

RATIO = 1.5  # the larger level over the smaller one


class TopKChannel(CodedRuns):
    """Runs of matrices, each one sparse vector, and the small rest."""

    def __init__(self, method: TopK, fragment: Fragment, seat: Seat, opening: Opening) -> None:
        runs = [
            SparseRun(method, start, stop, seat, opening) for start, stop in fragment.coded_runs
        ]
        super().__init__(runs, SmallPart(method.small_wire, fragment, seat, opening))


class SparseRun(CodedRun):
    """One run of elements, of which the largest travel; all gather all."""

    def __init__(self, method: TopK, start: int, stop: int, seat: Seat, opening: Opening) -> None:
        self.start, self.stop = start, stop
        form, numel = method.format, stop - start
        self.mean = CodedMean(numel, form, form, seat, is_gathered=True, opening=opening)
        self.residual = Residual(numel, method.error_feedback, method.feedback_decay, opening)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average the run inside `x`, in place."""
        run = x[self.start : self.stop]
        return self.mean.exchange(run, self.residual, number=launch.round)

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode the run inside `x`, in place of it what is decoded."""
        self.mean.encode(x[self.start : self.stop], self.residual, number=launch.round)

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Pick the largest of the run inside `x` once more, for the residual."""
        self.mean.recode(x[self.start : self.stop], self.residual)


class SparseCodec(ChunkCodec):
    """`Codec` of sparse messages.

    Unlike other codecs it allocates in every call, but only temporaries as long as what is kept,
    k / chunk of the vector. With feedback, the residual's memory is the work space for all of it.
    """

    kernels = "eager"

    def __init__(
        self,
        form: SparseFormat,
        numel: int,
        device: torch.device,
        kernels: Kernels,
        buffers: Buffers | None = None,
    ) -> None:
        require_choice("kernels", kernels, Kernels)
        super().__init__(form, numel, buffers or Buffers(device))
        self._form: SparseFormat = form
        self._levels = torch.tensor([1.0, RATIO, -1.0, -RATIO], device=device)

    def encode(self, x: Tensor, out: Tensor, seed: int = 0) -> None:
        """Write the message of `x` to `out`; nothing is random, so `seed` has no effect."""
        self._require_sizes(x, out)
        self._encode(x, self._new("magnitudes", tuple(x.shape), torch.float32), out)

    def encode_with_feedback(self, x: Tensor, residual: Tensor, out: Tensor, seed: int = 0) -> None:
        """Add `residual` to `x`, write the message to `out` and the error to `residual`."""
        self._require_sizes(x, out)
        self._encode(x.add_(residual), residual, out)
        self._add(out, residual.copy_(x), sign=-1)

    def _encode(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        """Write the message of `x` to `out`; `work` is as long as `x`."""
        kept = self._form.num_kept(x.numel())
        indices = self._new("indices", (kept,), torch.int64)
        magnitudes = self._new("kept", (kept,), torch.float32)
        codes = self._new("codes of entries", (kept,), torch.uint8)
        scales = self._new("scales", (-(-x.numel() // self._form.chunk),), torch.bfloat16)
        torch.abs(x, out=work)
        for block in self._blocks(x.numel()):
            index, largest = block.kept(indices), block.kept(magnitudes)
            torch.topk(block.elements(work), block.k, out=(largest, index))
            num_large, scale = two_levels(largest)
            block.scales(scales).copy_(scale)
            code = block.kept(codes)
            code.copy_(block.elements(x).gather(1, index) < 0).mul_(2)
            code.add_(torch.arange(block.k, device=x.device) < num_large)
        sections = out.split(self._form.section_bytes(x.numel()))
        pack_indices(indices, sections[0])
        pack_codes(codes, sections[1])
        sections[2].copy_(scales.view(torch.uint8))

    def _add(self, data: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the values of `data`, times `sign`, to `out`; no position comes twice."""
        sections = data.split(self._form.section_bytes(out.numel()))
        kept = self._form.num_kept(out.numel())
        positions = self._from_start(unpack_indices(sections[0], kept), out.numel())
        values = self._levels[unpack_codes(sections[1], kept)]
        scales = sections[2].clone().view(torch.bfloat16).float()
        for block in self._blocks(out.numel()):
            block.kept(values).mul_(block.scales(scales))
        out.index_add_(0, positions, values, alpha=sign)


def two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of each row become 1.5 s, and s itself, `[rows, 1]` both, s in bf16.

    Rows of `magnitudes` descend. With the first j at the larger level, g their levels in units
    of s and m the magnitudes, s = m.g / g.g is best, and (m.g)^2 / g.g is what it takes off the
    squared error: the j with the most of it wins. An s below 2^-100 becomes 0: nothing is sent.
    """
    num_rows, k = magnitudes.shape
    top = magnitudes[:, :1].clamp(min=MIN_SCALE)
    sums = magnitudes.new_zeros(num_rows, k + 1)
    torch.cumsum(magnitudes / top, dim=1, out=sums[:, 1:])
    total = sums[:, -1:].clone()
    products = sums.mul_(RATIO - 1).add_(total)
    squares = torch.arange(k + 1, device=top.device) * (RATIO**2 - 1) + k
    num_large = (products.square() / squares).argmax(dim=1, keepdim=True)
    scale = products.gather(1, num_large) / squares[num_large] * top
    scale = scale.clamp(max=largest_scale(RATIO)).bfloat16()
    return num_large, scale * (scale >= MIN_SCALE)


def pack_codes(codes: Tensor, out: Tensor) -> None:
    """Write 2-bit `codes`, uint8, to `out`: the first of four in the lowest bits."""
    fours = F.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    out.copy_(fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6))


def unpack_codes(data: Tensor, num_codes: int) -> Tensor:
    """Return what `pack_codes` wrote, int64 `[num_codes]`."""
    shifts = torch.arange(0, 8, 2, device=data.device)
    return ((data.long().view(-1, 1) >> shifts) & 3).view(-1)[:num_codes]
