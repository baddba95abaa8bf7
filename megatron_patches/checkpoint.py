"""Outer state travels with Megatron's checkpoint of the same iteration.

Wraps `save_checkpoint` where the training loop finds it. The outer state is written first, whole or
not at all, so that it is complete whenever `latest_checkpointed_iteration.txt` names the iteration,
with `--async-save`, too; the other clusters hear of it once Megatron's own save has returned. With
`checkpoints.beside_training` both are written while training goes on, and a start takes an
iteration that has both (resume.py); not with `--save-retain-interval`, by which Megatron deletes
the iteration before as soon as its own part is whole. After `finish()` Megatron saves the averaged
model. The outer state lies in `<save>/dsx`; what Megatron has deleted there is deleted here.
Loading is in model_and_optimizer.py: a missing or foreign state is an error.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import REMOVED
from dsx.checkpoint.keep import remove_tag
from dsx.checkpoint.tags import cluster_directory
from dsx.engines.megatron.checkpoint import save_outer_state
from dsx.engines.megatron.own_part import iteration_of, tag_of
from megatron_patches import probe
from megatron_patches.failed_save import survives
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
        directory, run.saved_iteration = Path(arguments.save), None
        states = cluster_directory(directory / "dsx", run.world.cluster_id)
        if getattr(arguments, "save_retain_interval", None):
            run.handle.beside.refuse("--save-retain-interval, which deletes the iteration before")
        if why := find_obstacle(directory, states, run.world.rank == 0):
            run.handle.not_saved(
                states / tag_of(iteration),
                f"iteration {iteration} is not saved: {why}; training goes on",
            )
            return None
        keeping, place = run.handle.keeping, run.division.place
        with run.handle.saving(), keeping.behind_engine(), place.saving(arguments):
            if not save_outer_state(run.handle, iteration, directory):
                return None  # as said; what Megatron writes to a full disk might end the run
            is_saved, result = survives(
                run, iteration, directory, states,
                lambda: original(iteration, model, optimizer, *args, **kwargs),
            )  # fmt: skip
            if not is_saved:
                return None
        run.saved_iteration = iteration
        if run.world.rank == 0:
            _delete_what_megatron_has(run, directory, states, iteration)
        return result

    training.save_checkpoint = save_checkpoint


def _delete_what_megatron_has(run: Run, directory: Path, states: Path, iteration: int) -> None:
    """Delete the outer state of iterations that have no checkpoint of Megatron's any more.

    What an earlier iteration held before it was saved again goes, too. What cannot be deleted
    stays, and a line says so.
    """
    for state in states.glob("iter_*"):
        saved = iteration_of(state.name)
        if saved is None or saved >= iteration or state.name.endswith(REMOVED):
            continue  # what is being removed goes with the next save
        if not (directory / state.name).exists():
            try:
                remove_tag(states, state.name)
            except OSError as error:
                run.tell(f"an old outer state stays: {error}")
