"""A batch that grows: `--rampup-batch-size`, and `--step-batch-size-schedule` of later releases.

Megatron decides a step's micro-batches by `consumed_train_samples`, which in its loop is what this
cluster has read: every cluster's batch grows at the same step, and is as large as in a run of its
own. In a checkpoint that name says how far all clusters are in the data (place.py), so after
loading the number is taken once more, by the cluster's own count. Samplers deal micro-batches, of
which a step takes as many as it has: how they are dealt does not change.
"""

from __future__ import annotations

from typing import Any

GROWS = ("rampup_batch_size", "step_batch_size_schedule")


def grows_by(arguments: Any) -> str | None:
    """Return the argument by which the batch grows, if one does."""
    return next((name for name in GROWS if getattr(arguments, name, None)), None)


def count_by_own(arguments: Any) -> None:
    """Let Megatron's calculator decide by the cluster's own count, before a loop begins."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    update_num_microbatches(arguments.consumed_train_samples, consistency_check=False)


def left_out() -> int:
    """Return by how many samples the step under way is short of its batch.

    `--decrease-batch-size-if-needed` rounds it down to whole micro-batches of all ranks, and
    Megatron counts the rest as skipped.
    """
    from megatron.core import num_microbatches_calculator as calculator

    whole: int = calculator.get_current_global_batch_size()
    return whole - calculator.get_current_running_global_batch_size()


def facts_of_batch(arguments: Any) -> dict[str, Any]:
    """Return what decides when a batch grows, which all clusters must have alike; empty if none.

    Where batches are rounded down, by what: else clusters' counts would go apart.
    """
    from megatron.core import parallel_state

    if grows_by(arguments) is None:
        return {}
    given = {name: getattr(arguments, name, None) for name in GROWS}
    unit = arguments.micro_batch_size * parallel_state.get_data_parallel_world_size()
    rounds = getattr(arguments, "decrease_batch_size_if_needed", False)
    return {**given, "rounded_to": unit if rounds else None}


def refuse_fixed_backwards(arguments: Any, backwards: int) -> None:
    """Raise ValueError for a `schedule.backwards` where the number of micro-batches changes."""
    grows = grows_by(arguments)
    if grows is not None and backwards != 1:
        flag = f"--{grows.replace('_', '-')}"
        raise ValueError(
            f"dsx.schedule.backwards={backwards} with {flag}, by which the number of micro-batches "
            "changes; leave it out: it is read from Megatron at every step"
        )
