"""The codec of every group format in torch: slices for compiled kernels, tiles for eager ones.

Byte layout of a message of n elements: all codes, `ceil(n / parts)` words; then all scales,
`ceil(n / group_size)` bf16 numbers, little-endian. Codes are packed in blocks (see `GroupFormat`);
elements that do not fill the last block form a shorter one, whose last group may be short and
whose missing digits are those of 0, or of the lowest level.

A slice is a whole number of blocks near 1 Mi elements: large enough to hide the call, small enough
for a cache. An accelerator is given slices of 64 Mi first, for its calls hide behind nothing less.
What does not fill a slice is done in tiles, whatever the kernels: the bits are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsx.compress.wire import group_slice
from dsx.compress.wire.base import TILE
from dsx.compress.wire.compiled import compile_kernel
from dsx.compress.wire.group_kernels import noise_key
from dsx.compress.wire.work_space import require_sizes
from dsx.core.buffers import Buffers

if TYPE_CHECKING:
    from dsx.compress.wire.group_format import GroupFormat

SLICE = 2**20
LARGE_SLICE = 64 * SLICE  # on an accelerator


class _Span(NamedTuple):
    """Whole blocks of a message, `[start, stop)` in elements, for the compiled kernel or eager."""

    start: int
    stop: int
    is_compiled: bool


class GroupCodec:
    """`Codec` for one `GroupFormat` on one device; see base.py for the contract.

    `kernels` is "compiled" or "eager".
    """

    def __init__(
        self,
        form: GroupFormat,
        numel: int,
        device: torch.device,
        kernels: str,
        buffers: Buffers | None = None,
    ) -> None:
        self.kernels = kernels
        self._form = form
        self._numel = numel
        self._new = (buffers or Buffers(device)).work
        sizes = (SLICE,) if device.type == "cpu" else (LARGE_SLICE, SLICE)
        self._slices = tuple(size // form.block * form.block for size in sizes)
        self._tile = TILE // form.block * form.block
        self._key = torch.zeros(3, dtype=torch.int32, device=device)
        self._compiled: dict[str, Callable[..., None]] = {}

    def encode(self, x: Tensor, out: Tensor, seed: int = 0) -> None:
        """Write the message of `x` to `out`."""
        require_sizes(x, out, self._numel, self._form.num_bytes(x.numel()))
        for span in self._spans(x.numel()):
            scales = self._scales(span.stop - span.start)
            self._set_key(seed, span.start)
            self._run(
                "encode", span, self._groups(x, span), self._codes(out, span), scales, self._key
            )
            self._scale_bytes(out, x.numel(), span).copy_(_bytes(scales))
        tail = self._tail(x.numel())
        if tail.start < tail.stop:
            self._encode_tail(x, out, tail, seed)

    def encode_with_feedback(self, x: Tensor, residual: Tensor, out: Tensor, seed: int = 0) -> None:
        """Add `residual` to `x`, write the message to `out` and the error to `residual`."""
        require_sizes(x, out, self._numel, self._form.num_bytes(x.numel()))
        for span in self._spans(x.numel()):
            scales = self._scales(span.stop - span.start)
            self._set_key(seed, span.start)
            groups, errors = self._groups(x, span), self._groups(residual, span)
            codes = self._codes(out, span)
            self._run("encode_with_feedback", span, groups, errors, codes, scales, self._key)
            self._scale_bytes(out, x.numel(), span).copy_(_bytes(scales))
        tail = self._tail(x.numel())
        if tail.start < tail.stop:
            own = x[tail.start :].add_(residual[tail.start :])
            codes, scale = self._encode_tail(x, out, tail, seed)
            value = group_slice.decode_codes(self._form, codes, scale, self._new)
            torch.sub(own, value, out=residual[tail.start :])

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of `data` to `out`."""
        self._decode("decode", data, out)
        tail = self._tail(out.numel())
        if tail.start < tail.stop:
            out[tail.start :].copy_(self._decode_tail(data, tail))

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of `data` to `out`."""
        self._decode("decode_add", data, out)
        tail = self._tail(out.numel())
        if tail.start < tail.stop:
            out[tail.start :].add_(self._decode_tail(data, tail))

    def _decode(self, operation: str, data: Tensor, out: Tensor) -> None:
        require_sizes(out, data, self._numel, self._form.num_bytes(out.numel()))
        form = self._form
        for span in self._spans(out.numel()):
            scales = self._scales(span.stop - span.start)
            _bytes(scales).copy_(self._scale_bytes(data, out.numel(), span))
            values = out[span.start : span.stop].view(-1, form.parts, form.width)
            self._run(operation, span, self._codes(data, span), scales, values)

    def _encode_tail(self, x: Tensor, out: Tensor, tail: _Span, seed: int) -> tuple[Tensor, Tensor]:
        scales = self._scales(tail.stop - tail.start)
        packed = self._code_bytes(out, tail)
        self._set_key(seed, tail.start)
        codes = group_slice.encode_tail(
            self._form, x[tail.start :], packed, scales, self._key, self._new
        )
        self._scale_bytes(out, tail.stop, tail).copy_(_bytes(scales))
        return codes

    def _decode_tail(self, data: Tensor, tail: _Span) -> Tensor:
        numel = tail.stop - tail.start
        scales = self._scales(numel)
        _bytes(scales).copy_(self._scale_bytes(data, tail.stop, tail))
        packed = self._code_bytes(data, tail)
        return group_slice.decode_tail(self._form, packed, scales, numel, self._new)

    def _run(self, operation: str, span: _Span, *tensors: Tensor) -> None:
        if not span.is_compiled:
            getattr(group_slice, operation)(self._form, *tensors, self._new)
            return
        kernel = self._compiled.get(operation)
        if kernel is None:
            kernel = self._compiled[operation] = _compile(operation, self._form)
        kernel(*tensors)

    def _spans(self, numel: int) -> Iterator[_Span]:
        """Cut the whole blocks of `numel` elements into slices, then tiles."""
        whole, done = numel // self._form.block * self._form.block, 0
        for size in self._slices if self.kernels == "compiled" else ():
            sliced = done + (whole - done) // size * size
            for start in range(done, sliced, size):
                yield _Span(start, start + size, True)
            done = sliced
        for start in range(done, whole, self._tile):
            yield _Span(start, min(start + self._tile, whole), False)

    def _tail(self, numel: int) -> _Span:
        return _Span(numel // self._form.block * self._form.block, numel, False)

    def _groups(self, x: Tensor, span: _Span) -> Tensor:
        return x[span.start : span.stop].view(-1, self._form.group_size)

    def _codes(self, message: Tensor, span: _Span) -> Tensor:
        form = self._form
        return self._code_bytes(message, span).view(-1, form.word_bytes, form.width)

    def _code_bytes(self, message: Tensor, span: _Span) -> Tensor:
        return message[self._form.code_bytes(span.start) : self._form.code_bytes(span.stop)]

    def _scales(self, numel: int) -> Tensor:
        # Not a view of the message: there, scales may lie at an odd address.
        return self._new("scales", (self._form.num_groups(numel), 1), torch.bfloat16)

    def _scale_bytes(self, message: Tensor, numel: int, span: _Span) -> Tensor:
        start = self._form.code_bytes(numel) + 2 * self._form.num_groups(span.start)
        return message[start : start + 2 * self._form.num_groups(span.stop - span.start)]

    def _set_key(self, seed: int, start: int) -> None:
        if self._form.is_stochastic:
            for index, word in enumerate(noise_key(seed, start)):
                self._key[index].fill_(word)


@functools.cache
def _compile(operation: str, form: GroupFormat) -> Callable[..., None]:
    """Return one kernel for all codecs of a format."""
    function: Callable[..., None] = getattr(group_slice, operation)

    def kernel(*tensors: Tensor) -> None:
        device = tensors[0].device

        def fresh(role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        function(form, *tensors, fresh)

    return compile_kernel(kernel)


def _bytes(scales: Tensor) -> Tensor:
    return scales.view(-1).view(torch.uint8)
