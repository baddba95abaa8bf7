"""Short tensors to one peer travel as one message.

A codec sends many: headers, sidebands, factors and scales of every matrix. Each message of its own
costs gloo's 56 bytes, TCP/IP headers, an acknowledgement, and two wake-ups of threads. Both ends
coalesce by sizes alone and so agree without a word; the bytes that arrive are those that were
sent. What is copied for it is short by definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHORT_BYTES = 64 * 1024  # a copy of so many takes less time than a message


def outgoing(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the messages: all short tensors in one, if there are two or more, then the rest.

    Empty tensors are no message.
    """
    short, long = _split(tensors)
    if len(short) < 2:
        return [*short, *long]
    return [torch.cat([_bytes(t) for t in short]), *long]


class Incoming:
    """The messages that `outgoing` of the other side makes, and the tensors they are for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._short, long = _split(tensors)
        self._coalesced: Tensor | None = None
        self.messages = [*self._short, *long]
        if len(self._short) > 1:
            sizes = [t.numel() * t.element_size() for t in self._short]
            self._coalesced = torch.empty(sum(sizes), dtype=torch.uint8)
            self.messages = [self._coalesced, *long]

    def deliver(self) -> None:
        """Fill the short tensors, once all messages have arrived."""
        if self._coalesced is None:
            return
        start = 0
        for tensor in self._short:
            stop = start + tensor.numel() * tensor.element_size()
            _bytes(tensor).copy_(self._coalesced[start:stop])
            start = stop


def _split(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    sized = [(t, t.numel() * t.element_size()) for t in tensors]
    short = [t for t, size in sized if 0 < size < SHORT_BYTES]
    return short, [t for t, size in sized if size >= SHORT_BYTES]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
