"""Masked language modelling: which tokens of a window are hidden, and what is to be predicted.

Source: BERT (arXiv:1810.04805, Sec. 3.1): 15 % of the positions are predicted, of which 80 % are
replaced by the mask token, 10 % by a random one, and 10 % stay.

What is hidden in a window follows from the window alone: it is the same in every run, every cluster
and every epoch.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_PREDICTED = -100  # what torch's cross entropy leaves out
_PREDICTED, _MASKED, _RANDOM = 0.15, 0.8, 0.1


def mask_tokens(windows: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 `[batch, length]` as `windows`.

    The mask token is `vocab_size`, so the model has one token more than the windows. A target is
    the token itself, or `NOT_PREDICTED`; at least one position of a window is predicted.
    """
    masked = [_mask(window, vocab_size) for window in windows.cpu()]
    inputs, targets = (torch.stack(column) for column in zip(*masked, strict=True))
    return inputs.to(windows.device), targets.to(windows.device)


def _mask(window: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_digest(window))
    chance, fate = torch.rand(2, len(window), generator=generator)
    others = torch.randint(vocab_size, window.shape, generator=generator)
    is_predicted = chance <= max(_PREDICTED, float(chance.min()))
    is_masked = is_predicted & (fate < _MASKED)
    is_random = is_predicted & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
    inputs = window.masked_fill(is_masked, vocab_size).where(~is_random, others)
    return inputs, window.masked_fill(~is_predicted, NOT_PREDICTED)


def _digest(window: Tensor) -> int:
    """Return a number that differs between windows, the order of their tokens included."""
    places = torch.arange(1, len(window) + 1)
    return int((window * places * 2654435761).sum()) % 2**63
