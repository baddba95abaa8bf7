"""The wire formats written naively, one group after the other: the oracle of the fast kernels.

No dsx import, no tiles, no bit tricks: grids are lists of numbers, a code is a place in the list.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRIDS = {
    "int8": [float(i) for i in range(128)],
    "int4": [float(i) for i in range(8)],
    "fp4_e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "fp4_e3m0": [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
    "fp8": [i / 8 for i in range(8)]
    + [2.0**e * (1 + m / 8) for e in range(15) for m in range(8)][:-1],
    "ternary": [0.0, 1.0],
    # without a zero: levels of a Gaussian, in whole numbers of 2^-14
    "1bit": [1.0],
    "2bit": [7418 / 2**14, 24747 / 2**14],
    "3bit": [4016 / 2**14, 12386 / 2**14, 22019 / 2**14, 35257 / 2**14],
}
LEVELS = ("1bit", "2bit", "3bit")
MANTISSA_BITS = {"fp8": 3, "fp4_e2m1": 1, "fp4_e3m0": 0}


def bf16_up(x: Tensor) -> Tensor:
    """The least bf16 number that is not below x, x >= 0."""
    rounded = x.bfloat16()
    above = torch.nextafter(rounded, torch.tensor(torch.inf).bfloat16())
    return torch.where(rounded.float() < x, above, rounded).float()


def group_scale(name: str, group: Tensor) -> Tensor:
    if not group.any():
        return torch.tensor(0.0)
    magnitude = group.abs()
    scale = magnitude.max() / GRIDS[name][-1]
    if name == "ternary":
        step = magnitude.max().clamp(min=2.0**-100) / 2**15
        whole = (magnitude * (1 / step)).floor()
        kept = whole[whole > whole.sum() * (0.7 / len(group))]
        scale = kept.sum() / max(len(kept), 1) * step
    largest = torch.tensor(torch.finfo(torch.float32).max / GRIDS[name][-1])
    if name in LEVELS:
        power, count = (1, 2**15) if name == "1bit" else (2, 2**8)
        step = magnitude.max().clamp(min=2.0**-100) / count
        whole = (magnitude * (1 / step) + 0.5).floor().double()
        mean = (whole**power).sum().float() * (1 / len(group))
        scale = (mean if power == 1 else mean.sqrt()) * step
        nearest = (scale.view(torch.int32) + 0x8000 & -0x10000).view(torch.float32)
        return nearest.clamp(2.0**-100, float((largest * (1 - 2.0**-8)).bfloat16()))
    return bf16_up(scale).clamp(2.0**-100, float((largest * (1 - 2.0**-8)).bfloat16()))


def group_ranks(name: str, group: Tensor, scale: Tensor) -> Tensor:
    """Signed places in the grid, as integers; ties to the upper neighbour.

    What is off a tie by less than fp32 tells counts as one.
    """
    if name == "ternary":
        step = group.abs().max().clamp(min=2.0**-100) / 2**15
        whole = (group.abs() * (1 / step)).floor()
        return (group.sign() * (whole > whole.sum() * (0.7 / len(group)))).int()
    if name in LEVELS:  # -2, -1, 1, 2: the place in the list, and a sign
        grid = GRIDS[name]
        cuts = [(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]
        place = 1 + sum(((group.abs() >= cut * scale).int() for cut in cuts), torch.tensor(0))
        return (place * torch.ones(()).copysign(group)).int()
    rank_info = group * (1 / scale.clamp(min=2.0**-100))
    if name in MANTISSA_BITS:  # evenly spaced between powers of two, and from 0 to 1
        size, exponent = rank_info.abs(), torch.frexp(rank_info).exponent - 1
        between = exponent + size / 2.0**exponent
        rank_info = (2 ** MANTISSA_BITS[name] * between.where(size >= 1, size)).copysign(rank_info)
    top = len(GRIDS[name]) - 1
    return (rank_info + 0.5).floor().clamp(-top, top).int()


def encode(name: str, x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Ranks `[n]` and scales `[groups]`."""
    groups = x.split(group_size)
    scales = [group_scale(name, group) for group in groups]
    ranks = [group_ranks(name, g, s) for g, s in zip(groups, scales, strict=True)]
    return torch.cat(ranks), torch.stack(scales)


def decode(name: str, ranks: Tensor, scales: Tensor, group_size: int) -> Tensor:
    grid = torch.tensor(GRIDS[name])
    values = grid[ranks.abs().long() - int(name in LEVELS)] * ranks.sign()
    return values * scales.repeat_interleave(group_size)[: len(ranks)]


def pack(name: str, ranks: Tensor, group_size: int) -> Tensor:
    """The code bytes, block by block."""
    if name in LEVELS:
        return pack_levels(name, ranks, group_size)
    parts = {"int8": 1, "fp8": 1, "ternary": 5}.get(name, 2)
    block = group_size * (parts if name == "ternary" else 1)
    out: list[Tensor] = []
    for piece in ranks.split(block):
        width = -(-len(piece) // parts)
        padded = torch.zeros(width * parts, dtype=torch.int32)
        padded[: len(piece)] = piece
        digits = padded.view(parts, width)
        if parts == 1:
            out.append(digits[0] & 255)
        elif parts == 2:
            out.append((digits[0] & 15) + 16 * (digits[1] & 15))
        else:
            out.append(sum(3**k * (digits[k] + 1) for k in range(5)))
    return torch.cat(out).to(torch.uint8)


def pack_levels(name: str, ranks: Tensor, group_size: int) -> Tensor:
    """Bytes as binary digits, the last code first; of 3 bits two of each half, then the sign."""
    bits, out = int(name[0]), list[int]()
    for piece in ranks.split(group_size):
        whole = len(piece) + (-len(piece) % 8 if bits == 3 else 0)
        codes = [rank - (rank > 0) for rank in piece.tolist()] + [0] * (whole - len(piece))
        if bits == 3:  # -4 .. 3, as -2 or 2 and what is left
            lower = [code + 2 if code < 0 else code - 2 for code in codes]
            out += packed_bits(lower[: whole // 2], 2) + packed_bits(lower[whole // 2 :], 2)
            out += packed_bits([-(code < 0) for code in codes], 1)
        else:
            out += packed_bits(codes, bits)
    return torch.tensor(out, dtype=torch.uint8)


def packed_bits(codes: list[int], bits: int) -> list[int]:
    width = -(-len(codes) // (8 // bits))
    codes = codes + [0] * (width * (8 // bits) - len(codes))
    return [
        int("".join(f"{code % 2**bits:0{bits}b}" for code in codes[j::width][::-1]), 2)
        for j in range(width)
    ]


def message(name: str, x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The message of x, and what it decodes to."""
    ranks, scales = encode(name, x, group_size)
    tail = scales.bfloat16().view(torch.uint8)
    decoded = decode(name, ranks, scales, group_size)
    return torch.cat([pack(name, ranks, group_size), tail]), decoded
