"""The arithmetic of the group formats, written once for eager tiles and compiled slices.

Every function works on values `[groups, group_size]` or on bytes `[blocks, block_bytes]` and
writes to tensors it is given; intermediate results go to `scratch`. Run eagerly, that allocates
nothing; traced by torch.compile, the scratch tensors vanish and one loop over the slice remains.

Codes. A format is a symmetric grid of `2 * top_rank + 1` numbers; the code of a value is its rank
in the grid plus `offset`, so 0 has the code `offset` whatever the grid. `curve` maps a scaled
value to a real rank (linear between grid points), rounding is done on the rank, and `uncurve`
maps a whole rank back. For the integers both are the identity. Grids without a zero, and ternary,
are in mean_kernels.py.

Scales are bf16, those of a maximum rounded up so that nothing clips. They stay between 2^-100 and
what keeps the largest value finite: no product or quotient here leaves the normal range of fp32,
where flushing would differ between platforms. With at most 8 significant bits in a scale and 16 in
a grid number, `value * scale` is exact.

Noise is a hash of (seed, element index modulo 2^32), the finaliser of MurmurHash3 with a key
before and inside: a counter instead of a generator's state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.wire.mean_kernels import (
    UP,
    quantize_ternary,
    quantize_to_levels,
    to_bf16,
    to_levels,
)
from dsx.compress.wire.work_space import Scratch

if TYPE_CHECKING:
    from dsx.compress.wire.group_format import GroupFormat

_TOP_BITS = {2: 0xFF, 4: 0xAA, 16: 0x88}  # of a byte's digits, by base


def quantize(
    form: GroupFormat, x: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None, new: Scratch
) -> None:
    """Write the codes of `x`, fp32 whole numbers `[groups, size]`, and `scales` `[groups, 1]`."""
    torch.abs(x, out=codes)
    torch.amax(codes, dim=1, keepdim=True, out=scales)
    if form.is_ternary:
        quantize_ternary(x, codes, scales, new)
        return
    if form.levels:
        quantize_to_levels(form, x, codes, scales, new)
        return
    inverse = new("inverse", tuple(scales.shape), torch.float32)
    _round_up_scale(scales, form.top_value, inverse, new)
    torch.mul(x, inverse, out=codes)
    if form.mantissa_bits is not None:
        _curve(form, codes, form.mantissa_bits, new)
    if x.device.type != "cpu":  # changes nothing, but keeps a compiler from fusing mul and add
        codes.clamp_(-form.top_rank, form.top_rank)
    if noise is None:
        codes.add_(0.5).floor_()
    else:
        codes.add_(noise).floor_().clamp_(-form.top_rank, form.top_rank)  # sums may be rounded up


def dequantize(form: GroupFormat, codes: Tensor, scales: Tensor, new: Scratch) -> None:
    """Turn `codes` into values, in place; `scales` has the shape of `codes` or broadcasts to it."""
    if form.mantissa_bits is not None:
        _uncurve(codes, form.mantissa_bits, new)
    if form.levels:
        to_levels(form, codes, new)
    codes.mul_(scales)


def pack(form: GroupFormat, codes: Tensor, packed: Tensor, new: Scratch) -> None:
    """Write codes `[blocks, parts, width]` to bytes `[blocks, word_bytes, width]`."""
    if form.parts == 1:
        packed.view(torch.int8).copy_(codes)
    elif form.base == 8:  # what 2 bits say of a half, then the halves
        half = torch.sign(codes, out=new("value", tuple(codes.shape), torch.float32)).mul_(0.5)
        low = torch.sub(codes, half, alpha=4, out=new("rank", tuple(codes.shape), torch.float32))
        _pack(4, _by_four(low), _two_of_three(packed), new)
        _pack(2, half, packed[:, 2:], new)
    else:
        _pack(form.base, codes, packed, new)


def unpack(form: GroupFormat, packed: Tensor, codes: Tensor, new: Scratch) -> None:
    """Write the codes in bytes `[blocks, word_bytes, width]` to fp32 `[blocks, parts, width]`."""
    if form.parts == 1:
        codes.copy_(packed.view(torch.int8))
    elif form.is_ternary:
        _unpack_ternary(form, packed, codes, new)
    elif form.base == 8:
        half = new("value", tuple(codes.shape), torch.float32)
        _unpack(4, _two_of_three(packed), _by_four(codes), new)
        _unpack(2, packed[:, 2:], half, new)
        codes.add_(half.mul_(4.0)).add_(0.5 + 4 * 0.5)
    else:
        _unpack(form.base, packed, codes, new)
        if form.levels:
            codes.add_(0.5)


def _by_four(codes: Tensor) -> Tensor:
    """Return codes `[blocks, 8, width]` as `[blocks, 2, 4, width]`."""
    return codes.view(codes.shape[0], 2, 4, codes.shape[2])


def _two_of_three(packed: Tensor) -> Tensor:
    """Return the bytes of the lower digits, `[blocks, 2, 1, width]`."""
    return packed[:, :2].unsqueeze(2)


def _pack(base: int, codes: Tensor, packed: Tensor, new: Scratch) -> None:
    """Write codes `[..., parts, width]`, of one byte all parts, to `[..., 1, width]`."""
    parts = codes.shape[-2]
    total = new("packed", tuple(packed.shape), torch.float32)
    total.copy_(codes[..., -1:, :])
    for part in reversed(range(parts - 1)):
        total.mul_(base).add_(codes[..., part : part + 1, :])
    # every digit is made non-negative: of whole numbers with an even base half of it is added
    packed.copy_(total.add_(136.0 if base == 16 else (base**parts - 1) / 2))
    if base in _TOP_BITS:
        packed.bitwise_xor_(_TOP_BITS[base])


def _unpack(base: int, packed: Tensor, codes: Tensor, new: Scratch) -> None:
    """Write the two's complement numbers in bytes `[..., 1, width]` to `codes`."""
    bits = base.bit_length() - 1
    shift = new("shift", (codes.shape[-2], 1), torch.int8)
    torch.arange(8 - bits, -1, -bits, out=shift.view(-1))
    digits = new("digits", tuple(codes.shape), torch.int8)
    torch.bitwise_left_shift(packed.view(torch.int8), shift, out=digits)
    codes.copy_(digits.bitwise_right_shift_(8 - bits))


def _unpack_ternary(form: GroupFormat, packed: Tensor, codes: Tensor, new: Scratch) -> None:
    # Digit k is floor(byte / base^k) - base * floor(byte / base^(k+1)); adding 1/2 to the
    # byte keeps the quotients away from whole numbers, where their rounding would matter.
    power = new("power", (form.parts, 1), torch.float32)
    torch.arange(form.parts, out=power.view(form.parts)).mul_(-math.log(form.base)).exp_()
    byte = new("packed", tuple(packed.shape), torch.float32)
    above = new("value", tuple(codes.shape), torch.float32)
    torch.mul(byte.copy_(packed).add_(0.5), power, out=codes)
    torch.mul(codes, 1 / form.base, out=above).floor_()
    codes.floor_().sub_(above.mul_(form.base)).sub_(1.0)


def fill_noise(key: Tensor, noise: Tensor, new: Scratch) -> None:
    """Write uniform numbers in [0, 1) to `noise` `[n]`: a hash of the index and `key`.

    `key` is int32 `[3]`: the index of the first element, and the seed's two words.
    """
    numel = noise.numel()
    bits = new("bits", (numel,), torch.int32)
    high = new("high", (numel,), torch.int32)
    torch.arange(numel, out=bits)
    bits.add_(key[0]).bitwise_xor_(key[1])
    for shift, mask, factor in ((16, 0xFFFF, -2048144789), (13, 0x7FFFF, -1028477387)):
        torch.bitwise_right_shift(bits, shift, out=high).bitwise_and_(mask)
        bits.bitwise_xor_(high).mul_(factor).add_(key[2])
    torch.bitwise_right_shift(bits, 16, out=high).bitwise_and_(0xFFFF)
    bits.bitwise_xor_(high)
    torch.bitwise_right_shift(bits, 8, out=high).bitwise_and_(0xFFFFFF)
    noise.copy_(high).mul_(2.0**-24)


def noise_key(seed: int, start: int) -> tuple[int, int, int]:
    """Return the int32 words of `fill_noise`'s key for elements from `start` on."""
    words = (start, seed * 0x9E3779B1 + 0x7F4A7C15, (seed >> 32) * 0x85EBCA77 + seed * 0xC2B2AE3D)
    first, second, third = (((word + 2**31) & 0xFFFFFFFF) - 2**31 for word in words)
    return first, second, third


def _round_up_scale(scales: Tensor, top_value: float, inverse: Tensor, new: Scratch) -> None:
    """Turn group maxima into scales and their inverses, in place."""
    nonzero = new("nonzero", tuple(scales.shape), torch.float32)
    torch.sign(scales, out=nonzero)
    # by a tensor: by a number, CUDA multiplies with its rounded reciprocal, which is no division
    top = new("top", (1, 1), torch.float32).fill_(top_value)
    to_bf16(torch.div(scales, top, out=inverse), UP, top_value)
    torch.mul(inverse, nonzero, out=scales)
    torch.reciprocal(inverse, out=inverse)


def _curve(form: GroupFormat, x: Tensor, mantissa_bits: int, new: Scratch) -> None:
    """Map values to ranks in a small float's grid, in place: a piecewise linear logarithm."""
    shape = tuple(x.shape)
    rank = new("rank", shape, torch.float32)
    value = new("value", shape, torch.float32)
    num_bends = math.ceil(math.log2(form.top_value)) - 1
    if num_bends <= 5:  # with slope 1 up to 2, 1/2 up to 4, ...: a sum of clamped lines
        rank.copy_(x.mul_(2.0**-num_bends))
        for _ in range(num_bends):
            rank.add_(torch.clamp(x, -1.0, 1.0, out=value))
            x.mul_(2.0)
        torch.mul(rank, 2.0**mantissa_bits, out=x)
        return
    bits = new("bits", shape, torch.int32)
    torch.abs(x, out=value)
    torch.sub(value.view(torch.int32), 126 << 23, out=bits)
    rank.copy_(bits).mul_(2.0**-23)  # 1 at 1, 2 at 2, 3 at 4, and below the value under 1
    torch.maximum(rank, value.clamp_(max=1.0), out=rank)
    torch.copysign(rank.mul_(2.0**mantissa_bits), x, out=x)


def _uncurve(rank: Tensor, mantissa_bits: int, new: Scratch) -> None:
    """Map whole ranks to the values of the grid, in place, in integers."""
    shape = tuple(rank.shape)
    bits = new("bits", shape, torch.int32)
    sign = new("sign", shape, torch.int32)
    exponent = new("exponent", shape, torch.int32)
    torch.sign(bits.copy_(rank), out=sign)
    torch.bitwise_right_shift(bits.abs_(), mantissa_bits, out=exponent).sub_(1).clamp_(min=0)
    bits.sub_(exponent, alpha=2**mantissa_bits).bitwise_left_shift_(exponent)
    rank.copy_(bits.mul_(sign)).mul_(2.0**-mantissa_bits)
