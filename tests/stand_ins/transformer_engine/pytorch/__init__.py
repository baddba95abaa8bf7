"""Modules and tensors of the stand-in."""

from __future__ import annotations

import torch


class QuantizedTensor(torch.Tensor):
    """A tensor that says that it is fp32, as Transformer Engine's are made: codes inside."""
