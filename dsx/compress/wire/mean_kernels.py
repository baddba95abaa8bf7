"""Quantizers whose scale is a mean over the group: ternary, and the grids without a zero.

As in group_kernels.py: every function writes to tensors it is given, on values `[groups, size]`.
Means do not depend on the order of a sum: they are taken over |x| in whole steps of the group's
maximum / 2^15, and those of squares in steps of maximum / 2^8, so that sums of up to 256 values are
whole numbers up to 2^24, which fp32 holds exactly.

Levels are whole numbers of 2^-14, of 16 significant bits: a level times a scale is exact, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.wire.group_format import largest_scale
from dsx.compress.wire.work_space import Scratch

if TYPE_CHECKING:
    from dsx.compress.wire.group_format import GroupFormat

MIN_SCALE = 2.0**-100
STEPS = 2.0**15
STEPS_OF_SQUARES = 2.0**8
TERNARY_THRESHOLD = 0.7
UP, NEAREST = 0xFFFF, 0x8000  # added to the bits that bf16 lacks


def quantize_ternary(x: Tensor, codes: Tensor, scales: Tensor, new: Scratch) -> None:
    """Write codes 0, 1, 2 for -, 0, + and the mean of what is kept as the scale.

    `codes` comes in as |x|, `scales` as its maximum.
    """
    step, nonzero = _in_steps(codes, scales, STEPS, new)
    count = new("count", tuple(scales.shape), torch.float32)
    kept = new("value", tuple(codes.shape), torch.float32)
    codes.floor_()
    torch.sum(codes, dim=1, keepdim=True, out=scales)
    scales.mul_(TERNARY_THRESHOLD / x.shape[1])
    torch.sub(codes, scales, out=kept).sign_().clamp_(min=0)
    torch.sum(kept, dim=1, keepdim=True, out=count)
    codes.mul_(kept)
    torch.sum(codes, dim=1, keepdim=True, out=scales)
    scales.div_(count.clamp_(min=1)).mul_(step)
    torch.mul(torch.sign(x, out=codes), kept, out=codes)
    to_bf16(scales, UP, 1.0).mul_(nonzero)


def quantize_to_levels(
    form: GroupFormat, x: Tensor, codes: Tensor, scales: Tensor, new: Scratch
) -> None:
    """Write codes -1.5, -0.5, 0.5, 1.5 (of two levels), and the scale that levels are times of.

    That is the root mean square; with one level the mean of |x|. A code says between which cuts,
    half-way between levels, a value lies. `codes` comes in as |x|, `scales` as its maximum.
    """
    levels, shape = form.levels, tuple(codes.shape)
    step, nonzero = _in_steps(codes, scales, STEPS_OF_SQUARES if levels[1:] else STEPS, new)
    codes.add_(0.5).floor_()
    if levels[1:]:
        codes.mul_(codes)
    torch.sum(codes, dim=1, keepdim=True, out=scales)
    scales.mul_(1 / x.shape[1])
    if levels[1:]:
        root = new("root", tuple(scales.shape), torch.float64)
        scales.copy_(root.copy_(scales).sqrt_())  # MKL's of fp32 is not the nearest number
    to_bf16(scales.mul_(step), NEAREST, form.top_value).mul_(nonzero)
    codes.fill_(0.5)
    if levels[1:]:
        magnitude = torch.abs(x, out=new("value", shape, torch.float32))
        is_above = new("rank", shape, torch.float32)
        for below, above in zip(levels, levels[1:], strict=False):
            cut = torch.mul(scales, (below + above) / 2, out=step)
            codes.add_(torch.ge(magnitude, cut, out=is_above))
    torch.copysign(codes, x, out=codes)


def to_levels(form: GroupFormat, codes: Tensor, new: Scratch) -> None:
    """Map ranks to levels, in place: straight lines from one to the next, a sum of clamped ones."""
    levels, shape = form.levels, tuple(codes.shape)
    slopes = [2 * levels[0], *(b - a for a, b in zip(levels, levels[1:], strict=False))]
    if levels[1:]:
        total = new("rank", shape, torch.float32)
        line = new("value", shape, torch.float32)
        torch.clamp(codes, -0.5, 0.5, out=total).mul_(slopes[0] - slopes[1])
        for k in range(1, len(levels) - 1):
            torch.clamp(codes, -0.5 - k, 0.5 + k, out=line)
            total.add_(line.mul_(slopes[k] - slopes[k + 1]))
        codes.mul_(slopes[-1]).add_(total)
    else:
        codes.mul_(slopes[0])


def to_bf16(scales: Tensor, carry: int, top_value: float) -> Tensor:
    """Round scales to bf16, in place, and keep their products with a grid's numbers normal."""
    bits = scales.view(torch.int32)
    bits.add_(carry).bitwise_and_(-0x10000)
    return scales.clamp_(MIN_SCALE, largest_scale(top_value))


def _in_steps(
    codes: Tensor, scales: Tensor, num_steps: float, new: Scratch
) -> tuple[Tensor, Tensor]:
    """Divide |x| by steps of its maximum, in place; return the steps, and what has any as 1."""
    shape = tuple(scales.shape)
    step = new("inverse", shape, torch.float32)
    nonzero = new("nonzero", shape, torch.float32)
    count = new("count", shape, torch.float32)
    torch.sign(scales, out=nonzero)
    torch.clamp(scales, min=MIN_SCALE, out=step).mul_(1 / num_steps)
    codes.mul_(torch.reciprocal(step, out=count))
    return step, nonzero
