"""The few shapes that every part of dsx shares: where parameters lie and what a sync sees.

A fragment is a flat fp32 vector plus a layout; all algorithm math maps `Tensor[numel]` to
`Tensor[numel]`, so a ZeRO, tensor-parallel or pipeline shard is just a shorter vector.
Nothing here knows a process group, and `History` holds only values that are equal on every rank
of every cluster: schedules may decide from it and never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # what only plans is started without torch
    from torch import Tensor

SMALL_NUMEL = 1024
BackwardTrigger = Literal["before", "after"]  # of the inner optimizer's step


@dataclass(frozen=True)
class ParameterShape:
    """A whole trainable parameter of the model, as every rank of a cluster knows it.

    `dtype` is the model's own, by torch's name; masters are fp32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """A contiguous piece of one parameter inside a fragment's flat vector.

    `shape` is the piece's own shape: the parameter's where this rank holds all of it, else
    `(numel,)`. `offset` is its place in the fragment, `start` its first element in the flattened
    parameter, `whole` the shape of all of the parameter (empty: this is all of it).
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    start: int = 0
    whole: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of this piece."""
        return math.prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether the parameter is too small to be worth a code: a vector, or under 1024."""
        whole = self.whole or self.shape
        return len(whole) < 2 or math.prod(whole) < SMALL_NUMEL

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the parameter."""
        return not self.whole or math.prod(self.whole) == self.numel


@dataclass(frozen=True)
class Fragment:
    """A set of parameter pieces that is synchronised as one; `numel` may be 0 on a rank.

    `id` counts within the pipeline stage.
    """

    id: int
    stage: int
    layout: tuple[Slot, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the fragment on this rank."""
        return sum(slot.numel for slot in self.layout)

    @cached_property
    def coded_runs(self) -> list[tuple[int, int]]:
        """Return `(start, stop)` of what is worth a code, neighbours as one."""
        return runs_of([slot for slot in self.layout if not slot.is_small])

    @cached_property
    def small_runs(self) -> list[tuple[int, int]]:
        """Return `(start, stop)` of the rest, neighbours as one."""
        return runs_of([slot for slot in self.layout if slot.is_small])


def runs_of(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Return the ranges of slots in the order of their offsets, neighbours joined, none empty."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        start, stop = slot.offset, slot.offset + slot.numel
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return found


@dataclass(frozen=True)
class SyncParams:
    """What a controller may move while training, re-read at every boundary.

    `interval` is H in inner steps, `rank` the rank r of a low-rank codec, if a controller sets it,
    `overlap` the steps tau between a launch and its apply, if they follow from measured times.
    """

    interval: int
    rank: int | None = None
    overlap: int | None = None


@dataclass(frozen=True)
class Stage:
    """The pipeline stage of a rank: `index` of `count`."""

    index: int = 0
    count: int = 1

    def name_of(self, fragment: int) -> str:
        """Return what messages call a fragment: with the stage, where there are several."""
        where = f" of pipeline stage {self.index}" if self.count > 1 else ""
        return f"fragment {fragment}{where}"


@dataclass
class RoundsInARow:
    """Rounds of one fragment that went wrong one after another because of the same clusters."""

    in_a_row: int = 0
    since: int = 0  # a step: the first one's launch, or its beginning
    because_of: list[int] = field(default_factory=list[int])

    def count(self, because_of: list[int], step: int) -> None:
        """Take a round into account: wrong because of these clusters, or not wrong."""
        again = sorted(set(because_of) & set(self.because_of))
        if again:
            self.in_a_row, self.because_of = self.in_a_row + 1, again
        else:
            self.in_a_row, self.because_of = int(bool(because_of)), list(because_of)
            self.since = step if because_of else 0


@dataclass
class History:
    """The clock and what was launched, applied and agreed; equal on every rank of a stage.

    `step` counts inner step boundaries, skipped (overflow) steps included; 0 means "never". The
    lists have one entry per fragment:

    - `launched`, `applied`: step of the last launch and of the last apply;
    - `launches`: transfers launched; `rounds`: outer steps taken; `refusals`: of those, rounds
      refused since the last one that was not; `idle`: rounds in which a cluster took no step;
      `mended`: the step at which clusters that held different models were brought together;
    - `intervals`: launch to launch, of the transfer applied last;
    - `under_way`: launched and not applied, beyond those the delay policy always keeps;
    - `mean_norm`: L2 norm of the mean applied last, over all shards, if the schedule asks;
    - `transfer_seconds`, `backward_seconds`: agreed moving averages, the slowest rank's.

    `step_seconds` is the agreed time of one inner step without communication. `plan` belongs to
    the schedule, `decisions` to the controller: JSON values, in checkpoints like everything here.
    `guard` holds the averages of method/alarms.py, the rungs of method/ladder.py that they have led
    to, and what outer/guard.py is to forget; a mean that one cluster decodes differently is in its
    averages until it is found, and leads to no rung.
    `changed` are settings that were changed while training, by key (method/changes.py).
    At step `next_settling` the stages of a pipeline agree on H, if it may move.
    """

    num_fragments: int
    fragment_numel: list[int] = field(default_factory=list[int])
    step: int = 0
    launched: list[int] = field(default_factory=list[int])
    applied: list[int] = field(default_factory=list[int])
    launches: list[int] = field(default_factory=list[int])
    rounds: list[int] = field(default_factory=list[int])
    refusals: list[RoundsInARow] = field(default_factory=list[RoundsInARow])
    idle: list[RoundsInARow] = field(default_factory=list[RoundsInARow])
    mended: list[int] = field(default_factory=list[int])
    intervals: list[int] = field(default_factory=list[int])
    under_way: list[int] = field(default_factory=list[int])
    mean_norm: list[float | None] = field(default_factory=list[float | None])
    transfer_seconds: list[float | None] = field(default_factory=list[float | None])
    backward_seconds: list[float | None] = field(default_factory=list[float | None])
    step_seconds: float | None = None
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    decisions: dict[str, Any] = field(default_factory=dict[str, Any])
    next_settling: int = 0
    guard: dict[str, Any] = field(default_factory=dict[str, Any])
    changed: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        clocks = (self.launched, self.applied, self.intervals, self.fragment_numel)
        for in_a_row in (self.refusals, self.idle):
            if not in_a_row:
                in_a_row.extend(RoundsInARow() for _ in range(self.num_fragments))
        for counts in (*clocks, self.launches, self.rounds, self.mended, self.under_way):
            if not counts:
                counts.extend([0] * self.num_fragments)
        for values in (self.mean_norm, self.transfer_seconds, self.backward_seconds):
            if not values:
                values.extend([None] * self.num_fragments)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> History:
        """Rebuild what `state_dict` returned."""
        history = cls(**state)
        for name in ("refusals", "idle"):
            entries: list[Any] = getattr(history, name)  # those of dsx 0.2 know nothing of idle
            if name in state:
                setattr(history, name, [RoundsInARow(**entry) for entry in entries])
        return history


@dataclass
class SyncView:
    """What a delay policy sees when a transfer is applied; every tensor is fp32 `[numel]`.

    - `mean`: the averaged contribution as decoded from the wire, used up by the outer step where
      there is one; None for the empty transfers that next-sync policies start with;
    - `anchor`: the outer parameters, the outer step taken;
    - `step`: what the outer step has subtracted from them; None if none was taken;
    - `local`: the inner parameters now, if the policy needs them;
    - `kept`: what the policy kept of this transfer at its launch;
    - `own`: the contributions of this cluster that are still under way, as all decode them from the
      wire, oldest first, if kept;
    - `slots`: the policy's own state of this fragment, changed in place;
    - `scratch`: free work space;
    - `outer_update(w)`: what the outer rule would subtract from the anchor for gradient `w`, with
      momentum from `slots`; computed in place of `w`;
    - `per_tensor`: norms and factors of the single tensors in the fragment;
    - `age`: inner steps since launch; `interval`: from the launch before to this one;
    - `is_current`: nothing has changed the parameters since they were sent;
    - `report`: numbers for the sync's record (0-dim tensors; `*_norm` of this rank's shard).
    """

    mean: Tensor | None
    anchor: Tensor
    step: Tensor | None
    local: Tensor | None
    kept: Tensor | None
    own: Sequence[Tensor]
    slots: Mapping[str, Tensor]
    scratch: Tensor
    outer_update: Callable[[Tensor], Tensor]
    per_tensor: PerTensor
    num_clusters: int
    age: int
    interval: int
    is_current: bool
    report: dict[str, Tensor]


class PerTensor(Protocol):
    """The tensors of one fragment as whole parameters, whatever part of them lies on this rank."""

    def norms(self, x: Tensor) -> Tensor:
        """Return the L2 norm of every tensor of the fragment, fp32 `[num_tensors]`.

        Collective over the ranks of the cluster that share the fragment; the same bits on every
        cluster if `x` has the same bits.
        """
        ...

    def rms(self, x: Tensor) -> Tensor:
        """Return the root mean square of every tensor; collective like `norms`."""
        ...

    def spread(self, factors: Tensor, out: Tensor) -> Tensor:
        """Write `factors[i]` to every element of tensor i in `out` `[numel]`, and return it."""
        ...
