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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from dsx.core.types import SyncView

Keeps = Literal["local", "contribution"]
Export = Literal["anchor", "mean"]


class DelayPolicy(Protocol):
    """Pure decisions about one transfer.

    `keeps` says what to keep of each transfer until it is applied: one vector `[numel]`, or
    nothing. `export` says what a finished run hands out: the drained anchor, or the mean of the
    clusters' parameters.
    """

    keeps: ClassVar[Keeps | None]
    export: ClassVar[Export]

    @property
    def steps(self) -> int:
        """Return tau, the inner steps between launch and apply; 0 for next-sync policies."""
        ...

    @property
    def rounds_under_way(self) -> int:
        """Transfers of a fragment that stay under way from launch to launch; 0 if none."""
        ...

    @property
    def needs_local(self) -> bool:
        """Whether `merge` reads the inner parameters as they are at apply time."""
        ...

    @property
    def needs_anchor(self) -> bool:
        """Whether there has to be an anchor."""
        ...

    @property
    def restarts_from_anchor(self) -> bool:
        """Whether after each launch's boundary the inner parameters equal the anchor."""
        ...

    @property
    def splits_update(self) -> bool:
        """Whether it needs an outer rule that is linear."""
        ...

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the policy's own buffers `[numel]`, given the outer optimizer's."""
        ...

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Set the policy's buffers, in place, when training starts (again) from `anchor`."""
        ...

    def validate(self, interval: int) -> None:
        """Raise ValueError if the overlap does not fit H = `interval`."""
        ...

    def is_ripe(self, age: int, newer: int) -> bool:
        """Decide from steps since launch and launches of the same fragment since then."""
        ...

    def contribution(self, local: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return what is sent, computed in place of `local`."""
        ...

    def merge(self, view: SyncView) -> Tensor:
        """Return the new inner parameters; may be `view.anchor`, or `view.local` in place."""
        ...


@dataclass(frozen=True)
class Replace:
    """Blocking: apply in the step of the launch, `local = anchor`."""

    steps = 0
    rounds_under_way = 0
    keeps: ClassVar[Keeps | None] = None
    needs_local = False
    needs_anchor = True
    restarts_from_anchor = True
    splits_update = False
    export: ClassVar[Export] = "anchor"

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Nothing to remember."""
        return ()

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Nothing to set."""

    def validate(self, interval: int) -> None:
        """Accept every interval."""

    def is_ripe(self, age: int, newer: int) -> bool:
        """At once."""
        return True

    def contribution(self, local: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return the pseudo-gradient `anchor - local`, in place of `local`."""
        return torch.sub(anchor, local, out=local)

    def merge(self, view: SyncView) -> Tensor:
        """Return the anchor."""
        return view.anchor


def require_overlap(steps: int, interval: int, at_least: int) -> None:
    """Raise ValueError unless `at_least` <= tau < H: one transfer of a fragment under way."""
    if not at_least <= steps < interval:
        raise ValueError(
            f"delay.steps={steps} must be at least {at_least} and below schedule.interval="
            f"{interval}: a fragment's transfer has to be applied before its next launch; "
            f"use steps <= {interval - 1} or a larger interval"
        )
