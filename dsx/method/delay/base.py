"""The contract of a delay policy, and the blocking one.

Source: DiLoCo (arXiv:2311.08105, Alg. 1): wait for the mean, step the anchor, restart every
cluster from it. A policy answers: what is sent, when is it ripe, what do the inner parameters
become. Policies are frozen and stateless; everything they see arrives in the `SyncView`, and
what they have to remember lies in slots and buffers that they name and the `StateStore` holds.

Policies of the kind "next sync" (`rounds_under_way` > 0) apply a fragment's transfer when that
many newer ones of the same fragment have been launched. They start with as many empty transfers
under way, so that the first rounds need no special case: `merge` sees `mean=None`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from annotated_types import Ge

from dsx.core.registry import contract, register
from dsx.core.types import History, SyncView

if TYPE_CHECKING:
    from torch import Tensor

Steps = Annotated[int, Ge(0)] | Literal["auto"]
Keeps = Literal["local", "contribution"]
Export = Literal["anchor", "mean"]


@contract("delay")
class DelayPolicy(Protocol):
    """Pure decisions about one transfer; what most policies share is said here.

    - `steps`: tau, the inner steps between launch and apply; 0 for next-sync policies; "auto": as
      many as a transfer takes (`overlap`);
    - `keeps`: what to keep of each transfer until it is applied: one vector `[numel]`, or nothing.
      A "contribution" is this cluster's, as all decode it from the wire: codes are made once
      for all attempts then, and by the training thread where rounds are under way at a launch;
    - `keeps_current`: whether it needs that also where nothing changes the parameters from launch
      to apply;
    - `export`: what a finished run hands out: the drained anchor, or the mean of the clusters'
      parameters;
    - `needs_local`: whether `merge` reads the inner parameters as they are at apply time;
    - `needs_anchor`: whether there has to be an anchor;
    - `restarts_from_anchor`: whether after each launch's boundary the inner parameters equal the
      anchor;
    - `splits_update`: whether it needs an outer rule that is linear;
    - `keeps_unsent`: whether what coding loses stays in the inner parameters;
    - `shared_slots`: which of its buffers are the same in all clusters, as the anchor is;
    - `takes_parts`: whether it does the same to each element, whatever the others are, and reports
      nothing but norms: it is then given a part of a fragment at a time.
    """

    steps: int | Literal["auto"]
    keeps: ClassVar[Keeps | None] = None
    keeps_current: ClassVar[bool] = True
    export: ClassVar[Export] = "anchor"
    needs_local: bool = False
    needs_anchor: bool = True
    restarts_from_anchor: bool = False
    splits_update: bool = False
    keeps_unsent: bool = False
    shared_slots: ClassVar[tuple[str, ...]] = ()
    takes_parts: bool = False

    @property
    def uses_seconds(self) -> bool:
        """Whether tau follows from measured times, which then travel with the transfers."""
        return self.steps == "auto"

    def overlap(
        self, fragment: int, interval: int, history: History, shared_by: int = 1
    ) -> int | None:
        """Return tau of a launch at H = `interval` where it is "auto", None where it is fixed.

        It is the agreed time of a transfer in agreed steps, from 1 to H/2; before there is one, the
        steps until the next fragment's launch. As many as `shared_by` are launched together, and
        share the line.
        """
        if self.steps != "auto":
            return None
        seconds = history.transfer_seconds[fragment]
        if seconds and history.step_seconds:
            steps = math.ceil(shared_by * seconds / history.step_seconds)
        else:
            steps = shared_by * interval // history.num_fragments
        return min(max(1, steps), interval // 2)

    def fresh_share(self, num_clusters: int) -> float | None:
        """Return the share of a round under way that training goes on from (stability.py).

        None if that model of stability is not the policy's.
        """
        return 0.0

    @property
    def rounds_under_way(self) -> int:
        """Transfers of a fragment that stay under way from launch to launch; 0 if none."""
        return 0

    @property
    def measures_tensors(self) -> bool:
        """Whether it asks for norms of single tensors, which take work space."""
        return False

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the policy's own buffers `[numel]`, given the outer optimizer's."""
        return ()

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Set the policy's buffers, in place, when training starts (again) from `anchor`."""

    def validate(self, interval: int) -> None:
        """Raise ValueError if the overlap does not fit H = `interval`."""

    def is_ripe(self, age: int, newer: int) -> bool:
        """Decide from steps since launch and launches of the same fragment since then."""
        if self.rounds_under_way:
            return newer >= self.rounds_under_way
        assert self.steps != "auto"  # then the launch knows (`SyncParams.overlap`)
        return age >= self.steps

    def origin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return from where a round's progress is measured: the anchor."""
        return anchor

    def contribution(self, local: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return what is sent, in place of `local`: the pseudo-gradient `origin - local`."""
        import torch

        return torch.sub(self.origin(anchor, slots), local, out=local)

    @property
    def steps_with_mean(self) -> bool:
        """Whether the outer rule is given the mean as it has come."""
        return type(self).gradient is DelayPolicy.gradient

    @property
    def is_difference(self) -> bool:
        """Whether what is sent is `origin - local`: it may then be formed elsewhere."""
        return type(self).contribution is DelayPolicy.contribution

    def gradient(self, mean: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return what the outer rule steps the anchor with, in place of the mean that has come."""
        return mean

    @abstractmethod
    def merge(self, view: SyncView) -> Tensor:
        """Return the new inner parameters; may be `view.anchor`, or `view.local` in place."""
        ...


@register("delay", "blocking")
@dataclass(frozen=True)
class Blocking(DelayPolicy):
    """Apply in the step of the launch: `local = anchor`."""

    steps = 0
    restarts_from_anchor = True
    takes_parts = True

    def merge(self, view: SyncView) -> Tensor:
        """Return the anchor."""
        return view.anchor


def require_overlap(steps: int | Literal["auto"], interval: int) -> None:
    """Raise ValueError unless tau < H: one transfer of a fragment under way."""
    if steps == "auto":
        if interval < 2:
            raise ValueError(
                f"delay.steps='auto' needs a step between two launches, and schedule.interval="
                f"{interval} has none; use an interval of 2 or more, or delay.steps=0"
            )
        return
    if steps >= interval:
        raise ValueError(
            f"delay.steps={steps} must be below schedule.interval={interval}: a fragment's "
            "transfer has to be applied before its next launch; "
            f"use steps <= {interval - 1} or a larger interval"
        )
