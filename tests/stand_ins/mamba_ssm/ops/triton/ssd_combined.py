"""Convolution and scan of Mamba-2, a token at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

mamba_chunk_scan_combined = None  # of the path that Megatron does not train by


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    **others: Any,
) -> Tensor:
    """Return `[batch, length, heads * headdim]` of gate, x, B, C and dt, which are in a row.

    The state of a head decays by exp(dt A), and takes dt x B'; what is read from it is C.
    """
    heads, inner = len(A), len(A) * headdim
    states = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    gate, mixed, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    length, width = mixed.shape[1], conv1d_weight.shape[-1]
    padded = F.pad(mixed.transpose(1, 2), (width - 1, 0))
    convolved = F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=padded.shape[1])
    mixed = F.silu(convolved).transpose(1, 2).float()
    x, b, c = mixed.split([inner, ngroups * states, ngroups * states], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        part.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, dim=2)
        for part in (b, c)
    )
    dt = F.softplus(dt.float() + dt_bias)
    state, read = torch.zeros_like(x[:, 0, :, :, None] * b[:, 0, :, None]), []
    for at in range(length):
        step = dt[:, at, :, None, None]
        state = state * (step * A[:, None, None]).exp()
        state = state + step * x[:, at, :, :, None] * b[:, at, :, None]
        read.append((state * c[:, at, :, None]).sum(-1))
    y = torch.stack(read, dim=1) + D[:, None] * x
    return (y.flatten(2) * F.silu(gate.float())).to(zxbcdt.dtype)
