"""How the experts of a Megatron model lie in its parameters, by the class that holds them.

A SequentialMLP has a module for each of a rank's experts, a TEGroupedMLP a parameter for each, and
a GroupedMLP two for all of them: `weight1` [hidden, experts x fc1] and `weight2`
[experts x fc2, hidden], whose memory is expert after expert, the transpose of what linear layers
have. Gate and up projection lie side by side in an expert's first matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("SequentialMLP", "TEGroupedMLP", "GroupedMLP")
_SEQUENTIAL = re.compile(r"^(.+\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED = re.compile(r"^(.+\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)$")
_STACKED = re.compile(r"^(.+\.experts\.)weight([12])$")


@dataclass(frozen=True)
class ExpertName:
    """A parameter of experts: of which linear layer, and of which expert, None for all in one."""

    kind: str
    prefix: str  # up to `.experts.`
    linear: str
    what: str  # weight or bias
    number: int | None

    @classmethod
    def of(cls, name: str) -> ExpertName | None:
        """Return what a name says, None for one that is not of experts as dsx knows them."""
        if found := _SEQUENTIAL.match(name):
            return cls(KINDS[0], found[1], found[3], found[4], int(found[2]))
        if found := _GROUPED.match(name):
            return cls(KINDS[1], found[1], found[2], found[3], int(found[4]))
        if found := _STACKED.match(name):
            return cls(KINDS[2], found[1], f"linear_fc{found[2]}", "weight", None)
        return None

    def with_number(self, number: int) -> str:
        """Return the name of the same parameter of another expert."""
        if self.kind == KINDS[0]:
            return f"{self.prefix}local_experts.{number}.{self.linear}.{self.what}"
        return f"{self.prefix}{self.linear}.{self.what}{number}"

    def cut(self, is_gated: bool) -> tuple[int, int]:
        """Return the dimension that expert-tensor-parallel ranks cut it along, and its runs.

        By the linear layer, as not every class marks it: the first is cut by its outputs, the
        second by its inputs. Of a stack the dimension counts the experts first.
        """
        is_first = self.linear == "linear_fc1"
        runs = 2 if is_first and is_gated else 1
        if self.number is None:  # transposed, behind the experts
            return (2 if is_first else 1), runs
        return (0 if is_first else 1), runs

    def as_stack(self, count: int, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the shape [experts, in, out] of a GroupedMLP's matrix of these many experts."""
        rows, columns = shape
        if self.linear == "linear_fc1":
            return count, rows, columns // count
        return count, rows // count, columns


def names_of(kind: str, prefix: str, linear: str, count: int) -> Iterator[str]:
    """Yield the names of the weights of a layer's experts, a stack's single one only once."""
    if kind == KINDS[2]:
        yield f"{prefix}weight{linear[-1]}"
        return
    one = ExpertName(kind, prefix, linear, "weight", 0)
    yield from map(one.with_number, range(count))
