"""One slice of a group format's message: what the codec runs, eagerly or compiled.

Whole blocks: `x` and `residual` are fp32 `[groups, group_size]`, `out` is fp32
`[blocks, parts, width]`, `packed` uint8 `[blocks, word_bytes, width]`, `scales` bf16
`[groups, 1]`. The shapes matter: the compiler makes its loops of them. `key` is the hash key of the
noise, unused by nearest rounding. These are the functions that torch.compile traces.

The tail, less than a block: the same on flat tensors, with a last group that may be short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.wire.group_kernels import (
    dequantize,
    fill_noise,
    pack,
    quantize,
    unpack,
)
from dsx.compress.wire.work_space import Scratch

if TYPE_CHECKING:
    from dsx.compress.wire.group_format import GroupFormat


def encode(
    form: GroupFormat, x: Tensor, packed: Tensor, scales: Tensor, key: Tensor, new: Scratch
) -> None:
    """Write the codes of `x` to `packed` and its scales to `scales`."""
    codes, _ = _quantize(form, x, scales, key, new)
    pack(form, codes.view(-1, form.parts, form.width), packed, new)


def encode_with_feedback(
    form: GroupFormat,
    x: Tensor,
    residual: Tensor,
    packed: Tensor,
    scales: Tensor,
    key: Tensor,
    new: Scratch,
) -> None:
    """Add `residual` to `x`, encode it, and write what got lost to `residual`; in place."""
    x.add_(residual)
    codes, scale = _quantize(form, x, scales, key, new)
    pack(form, codes.view(-1, form.parts, form.width), packed, new)
    dequantize(form, codes, scale, new)
    torch.sub(x, codes, out=residual)


def decode(form: GroupFormat, packed: Tensor, scales: Tensor, out: Tensor, new: Scratch) -> None:
    """Write the values to `out`."""
    unpack(form, packed, out, new)
    dequantize(form, out, _block_scales(form, scales, new), new)


def decode_add(
    form: GroupFormat, packed: Tensor, scales: Tensor, out: Tensor, new: Scratch
) -> None:
    """Add the values to `out`."""
    codes = new("codes", tuple(out.shape), torch.float32)
    unpack(form, packed, codes, new)
    dequantize(form, codes, _block_scales(form, scales, new), new)
    out.add_(codes)


def encode_tail(
    form: GroupFormat, x: Tensor, packed: Tensor, scales: Tensor, key: Tensor, new: Scratch
) -> tuple[Tensor, Tensor]:
    """Encode `x` `[n]`, n below a block; return its codes `[n]` and scales, for `decode_codes`."""
    numel, words = x.numel(), packed.view(1, form.word_bytes, -1)
    padded = words.shape[2] * form.parts
    codes = new("codes", (padded,), torch.float32)
    codes[numel:].fill_(0.5 if form.levels else 0.0)
    scale = new("scale", (scales.numel(), 1), torch.float32)
    noise = _noise(form, key, numel, new)
    for start, stop, size, groups in _runs(form, numel):
        quantize(
            form,
            x[start:stop].view(-1, size),
            codes[start:stop].view(-1, size),
            scale[groups],
            None if noise is None else noise[start:stop].view(-1, size),
            new,
        )
    scales.copy_(scale)
    pack(form, codes.view(1, form.parts, -1), words, new)
    return codes[:numel], scale


def decode_tail(
    form: GroupFormat, packed: Tensor, scales: Tensor, numel: int, new: Scratch
) -> Tensor:
    """Return the `numel` values of a tail, in scratch memory."""
    words = packed.view(1, form.word_bytes, -1)
    codes = new("codes", (words.shape[2] * form.parts,), torch.float32)
    unpack(form, words, codes.view(1, form.parts, -1), new)
    scale = new("scale", (scales.numel(), 1), torch.float32)
    return decode_codes(form, codes[:numel], scale.copy_(scales), new)


def decode_codes(form: GroupFormat, codes: Tensor, scale: Tensor, new: Scratch) -> Tensor:
    """Turn a tail's codes `[n]` into values, in place, and return them."""
    for start, stop, size, groups in _runs(form, codes.numel()):
        dequantize(form, codes[start:stop].view(-1, size), scale[groups], new)
    return codes


def _quantize(
    form: GroupFormat, x: Tensor, scales: Tensor, key: Tensor, new: Scratch
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1])
    codes = new("codes", shape, torch.float32)
    scale = new("scale", (shape[0], 1), torch.float32)
    noise = _noise(form, key, shape[0] * shape[1], new)
    quantize(form, x, codes, scale, None if noise is None else noise.view(shape), new)
    scales.copy_(scale)
    return codes, scale


def _noise(form: GroupFormat, key: Tensor, numel: int, new: Scratch) -> Tensor | None:
    if not form.is_stochastic:
        return None
    noise = new("noise", (numel,), torch.float32)
    fill_noise(key, noise, new)
    return noise


def _block_scales(form: GroupFormat, scales: Tensor, new: Scratch) -> Tensor:
    """Return fp32 scales `[blocks, groups per block, 1]`, which broadcast to a block's codes."""
    scale = new("scale", (scales.shape[0], 1), torch.float32)
    return scale.copy_(scales).view(-1, form.block // form.group_size, 1)


def _runs(form: GroupFormat, numel: int) -> list[tuple[int, int, int, slice]]:
    """Return (start, stop, group size, groups) of the whole groups and of a short last one."""
    count = numel // form.group_size
    whole = count * form.group_size
    runs = [
        (0, whole, form.group_size, slice(0, count)),
        (whole, numel, numel - whole, slice(count, count + 1)),
    ]
    return [run for run in runs if run[0] < run[1]]
