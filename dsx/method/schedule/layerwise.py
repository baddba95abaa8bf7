"""Layer-wise partial synchronisation: which layers to send in which of H iterations.

Source: DreamDDP (arXiv:2502.11058, Alg. 2, eq. 7-12). Layers are fragments. Each is sent once in
H iterations, launched inside the backward as soon as its own gradients are done, so that its
transfer hides behind the rest of the backward; layer_assignment.py finds the assignment of
layers to iterations that takes least time, and fills idle link time with further layers.

`when="before"`: sent with the weights before this step's update; the inner engine is left alone.
Masters rest from one optimizer step to the next, so it does not matter whether the gradients have
been reduced inside the cluster by then: every engine serves it.
`when="after"`: the layer's own optimizer step is taken inside the backward, then it is sent (the
paper's order). Whatever a script does to gradients between `backward()` and `optimizer.step()`
(GradScaler, clipping by the global norm, a closure) then comes too late: use `"before"` with
those, or clip per layer in `optimizer.register_step_pre_hook`, which sees one layer at a time.
It needs gradients that are complete in the backward: plain PyTorch in one process per cluster.
`backwards` is the number of backward passes (micro-batches) per inner step: only the last one
counts.

The times come from the run itself. In the first period, before there are any, each iteration sends
as many layers as the others and none is sent more than once: on a slow line H further sends would
take hours. From then on
they are the largest of all clusters' averages, looked at again at every period's end. A new table
is made when one has moved by more than 20 %. `backward_seconds` and `transfer_seconds`, one per
layer in model order, fix them instead, which makes a run reproducible.

`assignment="equal_numbers"` is the paper's PLSGD-ENP (Example 1): in every period each iteration
sends as many layers as the others, whatever they take, and idle time is not filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from dsx.core.checks import require_choice
from dsx.core.registry import register
from dsx.core.types import BackwardTrigger, History, Stage, SyncParams
from dsx.method.schedule.base import Interval, Schedule
from dsx.method.schedule.layer_assignment import Table, equal_numbers, layer_table

_TOLERATED_CHANGE = 0.2
_MOST_STEPS = 100_000  # of a period, as there is an entry for each
Assignment = Literal["optimal", "equal_numbers"]


@register("schedule", "layerwise")
@dataclass(frozen=True)
class Layerwise(Schedule):
    """Send layers by DreamDDP's table, from inside the backward."""

    interval: Interval
    """The period H in inner steps, within which every layer is sent at least once."""
    when: BackwardTrigger = "before"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a layer is sent with its parameters from before this step's update, or after the
    layer's own update inside the backward."""
    backwards: Annotated[int, Ge(1)] = 1
    """The backward passes (micro-batches) of one inner step, of which the last one sends. With
    DeepSpeed and in Megatron-LM's loop it is the engine's own number: leave it out."""
    backward_seconds: tuple[float, ...] | None = None
    """The seconds of each layer's backward, in model order; null: measured. Give both lists to make
    a run reproducible; in a pipeline, of the layers of a stage, for all stages the same."""
    transfer_seconds: tuple[float, ...] | None = None
    """The seconds of each layer's transfer, in model order; null: measured."""

    assignment: Assignment = "optimal"
    """Which layers go in which step: those that take least time, idle time filled (optimal), or
    equal numbers of layers in each step, of any times (equal_numbers)."""

    @property
    def uses_seconds(self) -> bool:
        """Unless both times are given, or not asked for."""
        return self.assignment == "optimal" and self.backward_seconds is None

    def table(self, backward: Sequence[float], transfer: Sequence[float], interval: int) -> Table:
        """Return what is sent in each iteration, from the seconds of each layer."""
        if self.assignment == "equal_numbers":
            return equal_numbers(len(backward), interval)
        return layer_table(backward, transfer, interval)

    def validate(self, num_fragments: int | None) -> None:
        """Require H >= 1, both times or neither, and one per layer."""
        super().validate(num_fragments)
        require_choice("schedule.when", self.when, BackwardTrigger)
        require_choice("schedule.assignment", self.assignment, Assignment)
        if (self.backward_seconds is None) != (self.transfer_seconds is None):
            raise ValueError(
                "schedule.backward_seconds and schedule.transfer_seconds belong together: give "
                "both, one number per layer, or neither to measure them"
            )
        for name in ("backward_seconds", "transfer_seconds"):
            values = getattr(self, name)
            if None not in (values, num_fragments) and len(values) != num_fragments:
                raise ValueError(
                    f"schedule.{name} has {len(values)} numbers for {num_fragments} layers "
                    "(fragments); give one per layer, in model order"
                )
        if self.interval > _MOST_STEPS:
            raise ValueError(
                f"schedule.interval={self.interval} is more than {_MOST_STEPS}, the most that a "
                "schedule layer by layer has a table for; use a smaller one, or schedule.type "
                "'periodic'"
            )
        if self.backward_seconds is not None and self.transfer_seconds is not None:
            self.table(self.backward_seconds, self.transfer_seconds, self.interval)

    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return this iteration's layers, the last one of the model first."""
        plan = history.plan
        return plan["table"][step - plan["start"] - 1]

    def advance(self, history: History, sync_params: SyncParams) -> None:
        """At a period's end, look at the times again; keep the table while they hold."""
        plan = history.plan
        if plan and history.step < plan["start"] + len(plan["table"]):
            return
        measured = None if self.assignment == "equal_numbers" else self._seconds(history)
        equal = [1.0] * history.num_fragments
        backward, transfer = measured or (equal, equal)
        is_same = (
            bool(plan)
            and plan.get("is_measured", True) == (measured is not None)
            and len(plan["table"]) == sync_params.interval
            and _is_close(backward, plan["backward"])
            and _is_close(transfer, plan["transfer"])
        )
        if not is_same:
            count, interval = history.num_fragments, sync_params.interval
            table = (
                self.table(backward, transfer, interval)
                if measured
                else equal_numbers(count, interval)
            )
            plan.update(table=[list(row) for row in table], backward=backward, transfer=transfer)
            plan["is_measured"] = measured is not None
        plan["start"] = history.step

    def _seconds(self, history: History) -> tuple[list[float], list[float]] | None:
        """Return the times per layer as given or as agreed; None before there are any.

        A layer that was never measured (its gradients never complete inside the backward) counts
        like the mean of the others.
        """
        if self.backward_seconds is not None and self.transfer_seconds is not None:
            return list(self.backward_seconds), list(self.transfer_seconds)
        backward = _filled(history.backward_seconds)
        transfer = _filled(history.transfer_seconds)
        if backward is None or transfer is None:
            return None
        return backward, transfer


def _filled(measured: Sequence[float | None]) -> list[float] | None:
    """Return the times with the mean of the known ones in place of None; None if none is known."""
    known = [s for s in measured if s is not None]
    if not known:
        return None
    return [sum(known) / len(known) if s is None else s for s in measured]


def _is_close(new: Sequence[float], old: Sequence[float]) -> bool:
    pairs = zip(new, old, strict=True)
    return all(abs(a - b) <= _TOLERATED_CHANGE * max(abs(b), 1e-12) for a, b in pairs)
