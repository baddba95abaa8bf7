"""Outer state travels with Megatron's checkpoint of the same iteration.

Wraps `save_checkpoint` where the training loop finds it. The outer state is written first, whole or
not at all, so that it is complete whenever `latest_checkpointed_iteration.txt` names the iteration,
with `--async-save`, too; with `checkpoints.beside_training` both are written while training goes
on, and a start takes an iteration that has both (resume.py). After `finish()` Megatron saves the
averaged model. The outer state lies in `<save>/dsx`; what Megatron has deleted there is deleted
here.
Loading is in model_and_optimizer.py: a missing or foreign state is an error.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from dsx.engines.megatron.checkpoint import save_outer_state
from megatron_patches import probe
from megatron_patches.room import find_obstacle
from megatron_patches.run import Run


def patch(run: Run) -> None:
    """Save before `save_checkpoint`."""
    training = probe.training()
    original = probe.function(training, "save_checkpoint", ["iteration", "model", "optimizer"])

    @functools.wraps(original)
    def save_checkpoint(iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any):
        if run.handle is None or not hasattr(optimizer, "dsx"):
            return original(iteration, model, optimizer, *args, **kwargs)
        arguments = probe.arguments_in_force()
        directory = Path(arguments.save)
        if why := find_obstacle(directory, run.world.rank == 0):
            state = directory / "dsx" / f"cluster_{run.world.cluster_id}" / f"iter_{iteration:07d}"
            run.handle.not_saved(
                state, f"iteration {iteration} is not saved: {why}; training goes on"
            )
            return None
        with run.handle.saving(), run.division.place.saving(arguments):
            if not save_outer_state(run.handle, iteration, directory):
                return None  # as said; what Megatron writes to a full disk would end the run
            result = original(iteration, model, optimizer, *args, **kwargs)
        if run.world.rank == 0:
            _delete_what_megatron_has(directory, run.world.cluster_id, iteration)
        return result

    training.save_checkpoint = save_checkpoint


def _delete_what_megatron_has(directory: Path, cluster_id: int, iteration: int) -> None:
    """Delete the outer state of iterations that have no checkpoint of Megatron's any more.

    What an earlier iteration held before it was saved again goes, too.
    """
    for state in (directory / "dsx" / f"cluster_{cluster_id}").glob("iter_*"):
        number = state.stem.removeprefix("iter_")
        is_older = number.isdigit() and int(number) < iteration
        if is_older and not (directory / state.name).exists():
            shutil.rmtree(state)
