"""Adaptive transmission: send as often as the link carries, the fragment that changes fastest.

Source: CoCoDC (arXiv:2504.17672, eq. 9-12, Alg. 2). With T_c the seconds of one inner step and T_s
those of one fragment's transfer:

    N   = max(P, floor(gamma * H * T_c / T_s))         transmissions per H inner steps
    R_p = |mean pseudo-gradient of p| / I_p            I_p: launch to launch; inf before the first

A decision comes at `ceil(j * H / N)` steps after N last changed, j = 1, 2, ... It takes the
stalest fragment if one has waited H steps, else the one with the largest R_p (ties: the lowest).
A fragment under way is not eligible; with none eligible, nothing is sent. The S stages of a
pipeline share the link: each sends n = max(P, floor(N / S)), stage s floor(s*H/(n*S)) later.

Deviations: the paper's spacing floor(H/N) overshoots gamma; it counts I_p, and the H steps after
which a fragment is overdue, from the completion of the transfer before, tau steps after its launch.
Here both are from launch to launch, since that is the progress D_p holds: by the paper's count, a
fragment sent every 2 tau steps would pass for one that changes twice as fast. T_c and T_s are
measured locally, so they travel with the transfers and all clusters use the largest; N = P until
the first transfer has been applied, a measured N is kept until it has moved by more than a tenth.
`step_seconds` and `transfer_seconds` fix them instead, which makes a run reproducible. Norms are
folded in a fixed order (per_tensor.py). A disagreement is found by the transfers' headers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from dsx.core.checks import require_choice
from dsx.core.registry import register
from dsx.core.types import History, Stage, SyncParams
from dsx.method.schedule.base import Interval, Schedule, require_step_per_fragment

logger = logging.getLogger(__name__)
Norm = Literal["l2", "rms"]
_TOLERATED_CHANGE = 0.1  # of a measured N; every change starts an epoch, which costs a decision


@register("schedule", "adaptive")
@dataclass(frozen=True)
class AdaptiveTransmission(Schedule):
    """As often as the link carries, each time the fragment that changes fastest."""

    interval: Interval
    """The period H in inner steps, within which every fragment is sent at least once."""
    gamma: Annotated[
        float, Gt(0), Le(1), "it is the share of the link's capacity to use; CoCoDC uses 0.4"
    ] = 0.4
    """The share of the link's capacity to use, above 0 and at most 1."""
    norm: Norm = "l2"
    """How change is measured: by the L2 norm of a fragment, or by its root mean square (rms), which
    does not favour large fragments."""
    step_seconds: Annotated[float | None, Gt(0)] = None
    """The seconds of one inner step; null: measured. Give both times to make a run reproducible."""
    transfer_seconds: Annotated[float | None, Gt(0)] = None
    """The seconds of one fragment's transfer; null: measured."""

    takes_turns = True
    uses_norms = True

    @property
    def uses_seconds(self) -> bool:
        """Unless both times are given."""
        return self.step_seconds is None or self.transfer_seconds is None

    def validate(self, num_fragments: int | None) -> None:
        """Require P <= H, 0 < gamma <= 1, and a link that can carry every fragment once."""
        super().validate(num_fragments)
        require_step_per_fragment(num_fragments, self.interval, "adaptive")
        require_choice("schedule.norm", self.norm, Norm)
        is_fixed = self.step_seconds is not None and self.transfer_seconds is not None
        if is_fixed and num_fragments is not None:
            assert self.step_seconds is not None and self.transfer_seconds is not None
            needed = _interval_needed(num_fragments, self.step_seconds, self.transfer_seconds)
            if needed > self.interval:
                raise ValueError(
                    f"schedule.interval={self.interval}: {num_fragments} transfers of "
                    f"{self.transfer_seconds:g} s do not fit into {self.interval} steps of "
                    f"{self.step_seconds:g} s; use interval >= {needed}"
                )

    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return the fragment chosen at this boundary, if it is one of decision."""
        plan, num_fragments = history.plan, history.num_fragments
        count = max(num_fragments, plan["transmissions"] // stage.count)
        # an epoch begins when a transfer is applied, which is a shifted one
        start = max(0, plan["epoch"] - _shift(stage, num_fragments, sync_params.interval))
        since = step - start - _shift(stage, count, sync_params.interval)
        decision = since * count // sync_params.interval
        if decision < 1 or -(-decision * sync_params.interval // count) != since:
            return ()
        free = [
            p for p in range(history.num_fragments) if self._is_free(p, step, history, sync_params)
        ]
        stale = [p for p in free if step - history.launched[p] >= sync_params.interval]
        if stale:
            return [min(stale, key=lambda p: history.launched[p])]
        return [max(free, key=lambda p: self._change_rate(p, history))] if free else ()

    def advance(self, history: History, sync_params: SyncParams) -> None:
        """Count the transmissions again from what has been agreed; a change starts a new epoch."""
        plan = history.plan
        count = self._transmissions(history, sync_params.interval)
        if not plan:
            plan.update(transmissions=count, epoch=0, is_warned=False)
        elif self._has_moved(count, plan["transmissions"]):
            plan.update(transmissions=count, epoch=history.step)
        self._warn_if_too_slow(history, sync_params)

    def _has_moved(self, count: int, before: int) -> bool:
        tolerated = _TOLERATED_CHANGE * before if self.uses_seconds else 0
        return abs(count - before) > tolerated

    def _transmissions(self, history: History, interval: int) -> int:
        """Eq. (9): N, at most one per inner step."""
        compute, transfer = self._seconds(history)
        if compute is None or not transfer:
            return history.num_fragments
        wanted = math.floor(self.gamma * interval * compute / transfer)
        return min(max(history.num_fragments, wanted), interval)

    def _seconds(self, history: History) -> tuple[float | None, float | None]:
        """Return T_c and T_s as given or agreed; None before the first transfer was applied."""
        if not any(history.rounds):
            return None, None
        measured = [s for s in history.transfer_seconds if s is not None]
        mean = sum(measured) / len(measured) if measured else None
        return self.step_seconds or history.step_seconds, self.transfer_seconds or mean

    def _is_free(self, fragment: int, step: int, history: History, sync_params: SyncParams) -> bool:
        """Whether its last transfer has ended or, on a link too slow for H, has had H steps."""
        if history.under_way[fragment]:
            return False
        compute, transfer = self._seconds(history)
        if not compute or not transfer or not history.launched[fragment]:
            return True
        needed = math.ceil(transfer / compute)
        return step - history.launched[fragment] >= min(needed, sync_params.interval)

    def _change_rate(self, fragment: int, history: History) -> float:
        """Eq. (11): R_p."""
        norm = history.mean_norm[fragment]
        if norm is None:
            return math.inf
        if self.norm == "rms":
            norm /= math.sqrt(max(history.fragment_numel[fragment], 1))
        return norm / history.intervals[fragment]

    def _warn_if_too_slow(self, history: History, sync_params: SyncParams) -> None:
        compute, transfer = self._seconds(history)
        if not compute or not transfer or history.plan["is_warned"]:
            return
        needed = _interval_needed(history.num_fragments, compute, transfer)
        if needed > sync_params.interval:
            history.plan["is_warned"] = True
            logger.warning(
                "the link cannot carry every fragment once in schedule.interval=%d steps: %d "
                "transfers of %.3g s, steps of %.3g s; training will wait for it, or use "
                "interval >= %d",
                sync_params.interval, history.num_fragments, transfer, compute, needed,
            )  # fmt: skip


def _shift(stage: Stage, count: int, interval: int) -> int:
    """Return how much later than the first stage this one decides, of `count` times in H steps."""
    return stage.index * interval // (count * stage.count)


def _interval_needed(num_fragments: int, step_seconds: float, transfer_seconds: float) -> int:
    """Return the smallest H with `P * T_s <= H * T_c`."""
    return math.ceil(num_fragments * transfer_seconds / step_seconds)
