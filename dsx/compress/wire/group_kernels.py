"""The arithmetic of the group formats, written once for eager tiles and compiled slices.

Every function works on values `[groups, group_size]` or on bytes `[blocks, block_bytes]` and
writes to tensors it is given; intermediate results go to `scratch`. Run eagerly, that allocates
nothing; traced by torch.compile, the scratch tensors vanish and one loop over the slice remains.

Codes. A format is a symmetric grid of `2 * top_rank + 1` numbers; the code of a value is its rank
in the grid plus `offset`, so 0 has the code `offset` whatever the grid. `curve` maps a scaled
value to a real rank (linear between grid points), rounding is done on the rank, and `uncurve`
maps a whole rank back. For the integers both are the identity.

Scales are bf16, rounded up so that nothing clips. They stay between 2^-100 and what keeps the
largest value finite: no product or quotient here leaves the normal range of fp32, where flushing
would differ between platforms. With at most 8 significant bits in a scale and in a grid number,
`value * scale` is exact.

Noise is a hash of (seed, element index modulo 2^32), the finaliser of MurmurHash3 with a key
before and inside: a counter instead of a generator's state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.wire.work_space import Scratch

if TYPE_CHECKING:
    from dsx.compress.wire.formats import GroupFormat

MIN_SCALE = 2.0**-100
FP32_MAX = 3.4028234663852886e38
TERNARY_STEPS = 2.0**15  # group sums of 256 values below it are whole numbers below 2^24: exact
TERNARY_THRESHOLD = 0.7
OFFSET = {3: 121.0, 16: 136.0}  # what makes every digit of a byte non-negative


def quantize(
    form: GroupFormat, x: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None, new: Scratch
) -> None:
    """Write the codes of `x`, fp32 whole numbers `[groups, size]`, and `scales` `[groups, 1]`."""
    torch.abs(x, out=codes)
    torch.amax(codes, dim=1, keepdim=True, out=scales)
    if form.is_ternary:
        _quantize_ternary(form, x, codes, scales, new)
        return
    inverse = new("inverse", tuple(scales.shape), torch.float32)
    _round_up_scale(scales, form.top_value, inverse, new)
    torch.mul(x, inverse, out=codes)
    if form.mantissa_bits is not None:
        _curve(form, codes, form.mantissa_bits, new)
    if noise is None:
        codes.add_(0.5).floor_()
    else:
        codes.add_(noise).floor_().clamp_(-form.top_rank, form.top_rank)  # sums may be rounded up


def dequantize(form: GroupFormat, codes: Tensor, scales: Tensor, new: Scratch) -> None:
    """Turn `codes` into values, in place; `scales` has the shape of `codes` or broadcasts to it."""
    if form.mantissa_bits is not None:
        _uncurve(codes, form.mantissa_bits, new)
    codes.mul_(scales)


def pack(form: GroupFormat, codes: Tensor, packed: Tensor, new: Scratch) -> None:
    """Write codes `[blocks, parts, width]` to bytes `[blocks, 1, width]`."""
    if form.parts == 1:
        packed.view(torch.int8).copy_(codes)
        return
    total = new("packed", tuple(packed.shape), torch.float32)
    total.copy_(codes[:, -1:])
    for part in reversed(range(form.parts - 1)):
        total.mul_(form.base).add_(codes[:, part : part + 1])
    packed.copy_(total.add_(OFFSET[form.base]))
    if form.base == 16:
        packed.bitwise_xor_(0x88)


def unpack(form: GroupFormat, packed: Tensor, codes: Tensor, new: Scratch) -> None:
    """Write the codes in bytes `[blocks, 1, width]` to fp32 `[blocks, parts, width]`."""
    shape = tuple(codes.shape)
    if form.parts == 1:
        codes.copy_(packed.view(torch.int8))
    elif form.base == 16:
        shift = new("shift", (2, 1), torch.int8)
        torch.arange(4, -1, -4, out=shift.view(2))
        digits = new("digits", shape, torch.int8)
        torch.bitwise_left_shift(packed.view(torch.int8), shift, out=digits)
        codes.copy_(digits.bitwise_right_shift_(4))
    else:
        # Digit k is floor(byte / base^k) - base * floor(byte / base^(k+1)); adding 1/2 to the
        # byte keeps the quotients away from whole numbers, where their rounding would matter.
        power = new("power", (form.parts, 1), torch.float32)
        torch.arange(form.parts, out=power.view(form.parts)).mul_(-math.log(form.base)).exp_()
        byte = new("packed", tuple(packed.shape), torch.float32)
        above = new("value", shape, torch.float32)
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
    torch.div(scales, top_value, out=inverse)
    bits = inverse.view(torch.int32)
    bits.add_(0xFFFF).bitwise_and_(-0x10000)
    inverse.clamp_(MIN_SCALE, largest_scale(top_value))
    torch.mul(inverse, nonzero, out=scales)
    torch.reciprocal(inverse, out=inverse)


def largest_scale(top_value: float) -> float:
    """Return the largest bf16 number whose product with `top_value` is finite in fp32."""
    bits = torch.tensor(FP32_MAX / top_value, dtype=torch.float64).float().view(torch.int32)
    scale = float((bits & -0x10000).view(torch.float32))
    return scale


def _quantize_ternary(
    form: GroupFormat, x: Tensor, codes: Tensor, scales: Tensor, new: Scratch
) -> None:
    """Write codes 0, 1, 2 for -, 0, + and the mean of what is kept as the scale.

    `codes` comes in as |x|, `scales` as its maximum. Means are taken over |x| in whole steps of
    maximum / 2^15, so that they do not depend on the order of the sum.
    """
    shape = tuple(scales.shape)
    step = new("inverse", shape, torch.float32)
    nonzero = new("nonzero", shape, torch.float32)
    count = new("count", shape, torch.float32)
    kept = new("value", tuple(codes.shape), torch.float32)
    torch.sign(scales, out=nonzero)
    torch.clamp(scales, min=MIN_SCALE, out=step).mul_(1 / TERNARY_STEPS)
    torch.reciprocal(step, out=count)
    codes.mul_(count).floor_()
    torch.sum(codes, dim=1, keepdim=True, out=scales)
    scales.mul_(TERNARY_THRESHOLD / x.shape[1])
    torch.sub(codes, scales, out=kept).sign_().clamp_(min=0)
    torch.sum(kept, dim=1, keepdim=True, out=count)
    codes.mul_(kept)
    torch.sum(codes, dim=1, keepdim=True, out=scales)
    scales.div_(count.clamp_(min=1)).mul_(step)
    torch.mul(torch.sign(x, out=codes), kept, out=codes)
    bits = scales.view(torch.int32)
    bits.add_(0xFFFF).bitwise_and_(-0x10000)
    scales.clamp_(MIN_SCALE, largest_scale(1.0)).mul_(nonzero)


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
