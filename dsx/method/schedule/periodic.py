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

from dsx.core.registry import register
from dsx.core.types import History, Stage, SyncParams
from dsx.method.schedule.base import Interval, Schedule, require_step_per_fragment


@register("schedule", "periodic")
@dataclass(frozen=True)
class Periodic(Schedule):
    """All fragments at t = H, 2H, ..."""

    interval: Interval
    """The period H in inner steps, at least 1."""

    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return every fragment H steps after their last launch, else none."""
        is_due = step - max(history.launched) >= sync_params.interval
        return range(history.num_fragments) if is_due else ()


@register("schedule", "streaming")
@dataclass(frozen=True)
class Streaming(Schedule):
    """Fragment p at `k*H + floor((p+1)*H/P)`: one fragment at a time, evenly spread."""

    interval: Interval
    """The period H in inner steps; at least the number of fragments."""

    takes_turns = True

    def validate(self, num_fragments: int | None) -> None:
        """Require 1 <= P <= H, so that no two fragments share a step."""
        super().validate(num_fragments)
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
