"""Fixed schedules: every fragment every H steps, at once or at offsets spread over the period.

Source: DiLoCo (arXiv:2311.08105, Alg. 1) for `Periodic`; Streaming DiLoCo (arXiv:2501.18512,
Sec. 2.1) for `Streaming`. H is `sync_params.interval`, in inner steps, and t is `step`.

`Streaming` launches fragment p at `t = k*H + offset_p` with `offset_p = floor((p+1)*H/P)`, so
fragment P-1 coincides with the plain period and the first pseudo-gradient of fragment p covers
`offset_p` steps only. P <= H keeps the offsets distinct. On stage s of S pipeline stages, offsets
are shifted by `floor(s*H/(P*S))`: the stages of a cluster share its uplink and must not all send
at once. A change of H takes effect with the next launch (`Periodic`) or period (`Streaming`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dsx.core.types import BackwardTrigger, History, Stage, SyncParams

# When a fragment is launched inside the backward: with the parameters before this step's update,
# or after it. None: at the step boundary.


class Schedule(Protocol):
    """Decides from values that are equal on every rank; `interval` is the initial H."""

    @property
    def interval(self) -> int:
        """H in inner steps, the value the first sync parameters carry."""
        ...

    @property
    def when(self) -> BackwardTrigger | None:
        """Whether what is due is launched inside the backward, and with which parameters."""
        ...

    @property
    def backwards(self) -> int:
        """Return the backward passes of one inner step (micro-batches); 1 if it never matters."""
        ...

    @property
    def takes_turns(self) -> bool:
        """Whether the stages of a pipeline send one after another."""
        ...

    @property
    def uses_seconds(self) -> bool:
        """Whether it decides from measured times, which then travel with the transfers."""
        ...

    @property
    def uses_norms(self) -> bool:
        """Whether it decides from the norms of the means."""
        ...

    def validate(self, num_fragments: int | None) -> None:
        """Raise ValueError if this schedule cannot serve that many fragments (None: not known)."""
        ...

    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return the fragments to launch at boundary `step`, in launch order."""
        ...

    def advance(self, history: History, sync_params: SyncParams) -> None:
        """Take note of what changed by the boundary just passed, in `history.plan`, in place.

        Called once before training and after the applies of every boundary.
        """
        ...


@dataclass(frozen=True)
class Periodic:
    """All fragments at t = H, 2H, ..."""

    interval: int

    when = None
    backwards = 1
    takes_turns = False
    uses_seconds = False
    uses_norms = False

    def validate(self, num_fragments: int | None) -> None:
        """Require H >= 1; any number of fragments can be sent at once."""
        require_interval(self.interval)

    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return every fragment H steps after their last launch, else none."""
        is_due = step - max(history.launched) >= sync_params.interval
        return range(history.num_fragments) if is_due else ()

    def advance(self, history: History, sync_params: SyncParams) -> None:
        """Nothing to note."""


@dataclass(frozen=True)
class Streaming:
    """Fragment p at `k*H + floor((p+1)*H/P)`: one fragment at a time, evenly spread."""

    interval: int

    when = None
    backwards = 1
    takes_turns = True
    uses_seconds = False
    uses_norms = False

    def validate(self, num_fragments: int | None) -> None:
        """Require 1 <= P <= H, so that no two fragments share a step."""
        require_interval(self.interval)
        require_step_per_fragment(num_fragments, self.interval, "streaming")

    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return the fragments whose offset falls on this step."""
        plan, num_fragments = history.plan, history.num_fragments
        fragments: list[int] = []
        for start, interval in ((plan["start"], plan["interval"]), plan["before"]):
            if interval:
                shift = stage.index * interval // (num_fragments * stage.count)
                offsets = ((p + 1) * interval // num_fragments for p in range(num_fragments))
                fragments += [
                    p for p, offset in enumerate(offsets) if start + offset + shift == step
                ]
        return fragments

    def advance(self, history: History, sync_params: SyncParams) -> None:
        """Open the next period at the end of one, with the H that is then in force."""
        plan = history.plan
        if not plan:
            plan.update(start=0, interval=sync_params.interval, before=[0, 0])
        elif history.step == plan["start"] + plan["interval"]:
            before = [plan["start"], plan["interval"]]
            plan.update(start=history.step, interval=sync_params.interval, before=before)


def require_interval(interval: int) -> None:
    """Raise ValueError unless H >= 1."""
    if interval < 1:
        raise ValueError(f"schedule.interval={interval} must be at least 1 inner step")


def require_step_per_fragment(num_fragments: int | None, interval: int, kind: str) -> None:
    """Raise ValueError unless P <= H."""
    if num_fragments is not None and num_fragments > interval:
        raise ValueError(
            f"fragments.num_fragments={num_fragments} does not fit schedule.interval="
            f"{interval}: a schedule of type {kind!r} needs one inner step per fragment "
            f"or more; use num_fragments <= {interval} or interval >= {num_fragments}"
        )
