"""A fragment in parts as long as a processor keeps at hand, so that a step over one reads it once.

A launch and an outer step are a dozen operations on the elements of a fragment. One after another
over all of it, each reads and writes the main memory; over a part of it, all but the first find it
in the cache. Bits are the same where every policy does the same to each element, which it says of
itself (`takes_parts`); else, with a staleness penalty, and on an accelerator, a fragment is one
part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterOptimizer
from dsx.outer.work_space import part_length


@dataclass(frozen=True)
class Part:
    """The elements of a fragment from `start` to `stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def of(self, vector: Tensor) -> Tensor:
        """Return them of a vector `[numel of the fragment]`: a view."""
        return vector[self.start : self.stop]

    def of_each(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return them of named vectors."""
        return {name: self.of(slot) for name, slot in slots.items()}


def parts_of(
    numel: int, device: torch.device, method: Method, rule: OuterOptimizer | None = None
) -> Iterator[Part]:
    """Yield the parts of a fragment whose state is on `device`, at least one.

    For a launch, or for the outer step that `rule` takes.
    """
    length = max(part_length(numel, method, device.type != "cpu", rule), 1)
    for start in range(0, max(numel, 1), length):
        yield Part(start, min(start + length, numel))


def joined(reports: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the report of a fragment: of parts, each is a norm, and so is the norm of those."""
    if len(reports) == 1:
        return reports[0]
    return {
        name: torch.linalg.vector_norm(torch.stack([report[name] for report in reports]))
        for name in reports[0]
    }
