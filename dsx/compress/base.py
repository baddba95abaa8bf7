"""The contract between what is sent and who sends it, and the exact fp32 exchange.

A compressor is a generator: it yields each tensor that has to be averaged over the clusters and
receives the mean back, in the same memory; its return value is what gets applied. It never sees
a process group, so the same code runs over a real network and with C clusters in one process.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Exchange = Generator[Tensor, Tensor, Tensor]


class Compressor(Protocol):
    """Turns a pseudo-gradient `[numel]` into averages and back."""

    def exchange(self, x: Tensor) -> Exchange:
        """Yield what must be averaged, receive means, return the decoded mean of `x`."""
        ...


@dataclass(frozen=True)
class Dense:
    """Send the fp32 pseudo-gradient as it is: 4 bytes per element, no error."""

    def exchange(self, x: Tensor) -> Exchange:
        """Average `x` itself, in place."""
        return (yield x)
