"""The channel of `TopK`, and the codec of its sparse messages; top_k.py says what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.compress.averaging import CodedMean
from dsx.compress.base import Channel, CodingError, Launch
from dsx.compress.error_feedback import Residual
from dsx.compress.quantized_channel import SmallPart, named_messages
from dsx.compress.wire.base import Kernels
from dsx.compress.wire.group_kernels import MIN_SCALE, largest_scale
from dsx.compress.wire.work_space import require_sizes
from dsx.core.buffers import Buffers, Opening
from dsx.core.checks import require_choice
from dsx.core.exchange import Exchange, together
from dsx.core.membership import Seat
from dsx.core.types import Fragment

if TYPE_CHECKING:
    from dsx.compress.top_k import SparseFormat, TopK

RATIO = 1.5  # the larger level over the smaller one


class TopKChannel(Channel):
    """Runs of matrices, each one sparse vector, and the small rest."""

    def __init__(self, method: TopK, fragment: Fragment, seat: Seat, opening: Opening) -> None:
        self._runs = fragment.coded_runs
        form, storage, decay = method.format, method.error_feedback, method.feedback_decay
        self._means = [
            CodedMean(b - a, form, form, seat, is_gathered=True, opening=opening)
            for a, b in self._runs
        ]
        self._residuals = [Residual(b - a, storage, decay, opening) for a, b in self._runs]
        self._small = SmallPart(method.small_wire, fragment, seat, opening)

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of the runs."""
        pairs = zip(self._runs, self._residuals, strict=True)
        return {f"residual.{i}": CodingError(*run, e) for i, (run, e) in enumerate(pairs)}

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in place; all clusters decode the same bytes."""
        parts = [
            mean.exchange(x[start:stop], residual, number=launch.round)
            for (start, stop), mean, residual in self._coded
        ]
        yield from together(*parts, self._small.exchange(x, launch))
        return x

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Make the messages of a launch, and of `x`, in place, what is decoded of them."""
        for (start, stop), mean, residual in self._coded:
            mean.encode(x[start:stop], residual, number=launch.round)
        self._small.encode(x, launch)

    def messages(self, launch: Launch) -> Mapping[str, Tensor]:
        """The codes of the runs, and of the small rest."""
        means = {str(index): mean for index, mean in enumerate(self._means)}
        return named_messages({**means, "small": self._small.mean}, launch)

    def can_recode(self, launch: Launch) -> bool:
        """Always: everybody gathers all codes."""
        return True

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Pick the largest of the runs once more, for their residuals."""
        for (start, stop), mean, residual in self._coded:
            mean.recode(x[start:stop], residual)

    @property
    def _coded(self) -> list[tuple[tuple[int, int], CodedMean, Residual]]:
        return list(zip(self._runs, self._means, self._residuals, strict=True))


@dataclass(frozen=True)
class Block:
    """Chunks of one length: elements from `start`, entries kept from `kept_start` on."""

    num_chunks: int
    length: int
    k: int
    first_chunk: int
    start: int
    kept_start: int

    def elements(self, x: Tensor) -> Tensor:
        """Return the block's part of a vector, `[num_chunks, length]`."""
        stop = self.start + self.num_chunks * self.length
        return x[self.start : stop].view(self.num_chunks, self.length)

    def kept(self, entries: Tensor) -> Tensor:
        """Return the block's part of the entries kept, `[num_chunks, k]`."""
        stop = self.kept_start + self.num_chunks * self.k
        return entries[self.kept_start : stop].view(self.num_chunks, self.k)

    def scales(self, scales: Tensor) -> Tensor:
        """Return the block's scales, `[num_chunks, 1]`."""
        return scales[self.first_chunk : self.first_chunk + self.num_chunks].view(-1, 1)


class SparseCodec:
    """`Codec` of sparse messages; see wire/base.py for the contract.

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
        self._form = form
        self._numel = numel
        self._new = (buffers or Buffers(device)).work
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

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of `data` to `out`, zeros between them."""
        self._require_sizes(out, data)
        self._add(data, out.zero_())

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of `data` to `out`."""
        self._require_sizes(out, data)
        self._add(data, out)

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
        positions = unpack_indices(sections[0], kept)
        values = self._levels[unpack_codes(sections[1], kept)]
        scales = sections[2].clone().view(torch.bfloat16).float()
        for block in self._blocks(out.numel()):
            chunks = torch.arange(block.num_chunks, device=out.device).view(-1, 1)
            block.kept(positions).add_(chunks.mul_(block.length).add_(block.start))
            block.kept(values).mul_(block.scales(scales))
        out.index_add_(0, positions, values, alpha=sign)

    def _blocks(self, numel: int) -> Iterator[Block]:
        """Yield the full chunks as one block, the short last one as another."""
        k, chunk = self._form.k, self._form.chunk
        full, rest = divmod(numel, chunk)
        if full:
            yield Block(full, chunk, k, first_chunk=0, start=0, kept_start=0)
        if rest:
            yield Block(1, rest, min(k, rest), full, start=full * chunk, kept_start=full * k)

    def _require_sizes(self, x: Tensor, data: Tensor) -> None:
        require_sizes(x, data, self._numel, self._form.num_bytes(x.numel()))


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


def pack_indices(indices: Tensor, out: Tensor) -> None:
    """Write 12-bit `indices` to `out`: the first of two in the low half of 24 bits."""
    pairs = F.pad(indices, (0, indices.numel() % 2)).view(-1, 2)
    words = (pairs[:, 0] | (pairs[:, 1] << 12)).view(torch.uint8).view(-1, 8)
    out.copy_(words[:, :3].reshape(-1)[: out.numel()])


def unpack_indices(data: Tensor, num_indices: int) -> Tensor:
    """Return what `pack_indices` wrote, int64 `[num_indices]`."""
    triples = F.pad(data, (0, -data.numel() % 3)).view(-1, 3).long()
    words = triples[:, 0] | (triples[:, 1] << 8) | (triples[:, 2] << 16)
    return torch.stack([words & 0xFFF, words >> 12], dim=1).view(-1)[:num_indices]


def pack_codes(codes: Tensor, out: Tensor) -> None:
    """Write 2-bit `codes`, uint8, to `out`: the first of four in the lowest bits."""
    fours = F.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    out.copy_(fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6))


def unpack_codes(data: Tensor, num_codes: int) -> Tensor:
    """Return what `pack_codes` wrote, int64 `[num_codes]`."""
    shifts = torch.arange(0, 8, 2, device=data.device)
    return ((data.long().view(-1, 1) >> shifts) & 3).view(-1)[:num_codes]
