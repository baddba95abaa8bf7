"""The few shapes that every part of dsx shares: where parameters lie and what a sync sees.

A fragment is a flat fp32 vector plus a layout; all algorithm math maps `Tensor[numel]` to
`Tensor[numel]`, so a ZeRO, tensor-parallel or pipeline shard is just a shorter vector.
Nothing here knows a process group, and `History` holds only values that are equal on every rank
of every cluster: schedules may decide from it and never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ParameterShape:
    """A whole trainable parameter of the model, as every rank of a cluster knows it."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """A contiguous piece of one parameter inside a fragment's flat vector.

    `shape` is the piece's own shape: the parameter's where this rank holds all of it, else
    `(numel,)`. `offset` is its place in the fragment, `start` its first element in the flattened
    parameter.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    start: int = 0

    @property
    def numel(self) -> int:
        """Elements of this piece."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fragment:
    """A set of parameter pieces that is synchronised as one; `numel` may be 0 on a rank."""

    id: int
    stage: int
    layout: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements of the fragment on this rank."""
        return sum(slot.numel for slot in self.layout)


@dataclass(frozen=True)
class Knobs:
    """What a controller may move while training, re-read at every launch: H, in inner steps."""

    interval: int


@dataclass
class History:
    """The clock and what was launched and applied, per fragment; equal on every rank.

    `step` counts inner step boundaries, skipped (overflow) steps included. 0 means "never".
    """

    num_fragments: int
    step: int = 0
    launched: list[int] = field(default_factory=list[int])
    applied: list[int] = field(default_factory=list[int])
    rounds: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        for counts in (self.launched, self.applied, self.rounds):
            if not counts:
                counts.extend([0] * self.num_fragments)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> History:
        """Rebuild what `state_dict` returned."""
        return cls(**state)


@dataclass
class SyncView:
    """What a delay policy sees when a transfer is applied; every tensor is fp32 `[numel]`.

    `mean` is the averaged pseudo-gradient as decoded from the wire, `anchor` the outer
    parameters, `local` the inner parameters now (only if the policy needs them), `scratch` free
    work space, `age` the inner steps since launch.
    """

    mean: Tensor
    anchor: Tensor
    local: Tensor | None
    scratch: Tensor
    num_clusters: int
    age: int
