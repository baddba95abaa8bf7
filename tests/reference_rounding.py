"""Rounding to bf16 at random as its definition says, in whole numbers without a sign."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_BITS = np.uint64(0xFFFFFFFF)


def noise_of(places: Tensor, buffer: str, parameter: str, round: int) -> np.ndarray:
    """The 16 bits of each place in a whole parameter, uint32."""
    text = f"{buffer}\n{parameter}\n{round}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    x = (places.numpy().astype(np.uint64) * np.uint64(0x9E3779B1) + np.uint64(key)) & _BITS
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & _BITS
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & _BITS
    return (x >> np.uint64(16)).astype(np.uint32)


def rounded(values: Tensor, buffer: str, parameter: str, round: int, start: int = 0) -> Tensor:
    """Finite fp32 values, from place `start` of a parameter on, as bf16 has them, in fp32."""
    flat = values.reshape(-1).contiguous()
    noise = noise_of(torch.arange(start, start + flat.numel()), buffer, parameter, round)
    bits = flat.numpy().view(np.uint32).astype(np.uint64) + noise
    cut = ((bits >> np.uint64(16)) << np.uint64(16)).astype(np.uint32)
    return torch.from_numpy(cut.view(np.float32).copy()).view(values.shape)


def kept_momentum(values: Tensor, parameter: str, round: int) -> Tensor:
    """What is left of an outer rule's momentum after an outer round."""
    return rounded(values, "outer.momentum", parameter, round)
