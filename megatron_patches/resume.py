"""Which iteration `--load` means: the newest good one, of dsx's outer state and Megatron's part.

Megatron takes what its `latest_checkpointed_iteration.txt` names. Where the outer state of that
iteration is damaged, not finite, or lacking in a cluster, all clusters take an earlier one, by
Megatron's own `--ckpt-step`, before the model is built. `--ckpt-step` of a user's is left alone.
With a remote place (`checkpoints.remote`) what a cluster lacks is fetched before, both parts of it.
An earlier iteration is written to the tracker, so that a later one that Megatron has begun and not
ended never counts as named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsx.checkpoint.tags import write_durably
from dsx.engines.megatron.own_part import latest_iteration
from dsx.engines.megatron.resume import newest_iteration
from dsx.engines.megatron_model.dist_checkpoint import TRACKER
from megatron_patches.run import Run


def choose_iteration(run: Run, arguments: Any) -> None:
    """Set `--ckpt-step` where the last iteration is not good. Collective over all clusters.

    ValueError names the flags where outer state is there, and none of it is good; OSError in all
    clusters where one cannot write its tracker.
    """
    is_new = not arguments.load or getattr(arguments, "finetune", False)
    is_left_alone = is_new or bool(getattr(arguments, "ckpt_step", None))
    if any(run.world.rendezvous.gather("whether an iteration is chosen", is_left_alone)):
        return
    load = Path(arguments.load)
    try:
        iteration = newest_iteration(run.world, run.config.checkpoints, load, load)
    except ValueError as error:
        raise ValueError(f"--load {load}: {error} (here: --ckpt-step)") from None
    if iteration is None:
        return
    latest, gather = latest_iteration(load), run.world.rendezvous.gather
    gather("what Megatron has named", latest)  # all have read before one writes
    trouble = None
    if iteration != latest:
        arguments.ckpt_step = iteration
        run.tell(f"goes on from iteration {iteration}, not {latest}, which is not good everywhere")
        trouble = _name(iteration, load, arguments.save) if run.world.rank == 0 else None
    if troubles := [text for text in gather("what Megatron is to name", trouble) if text]:
        raise OSError("; ".join(troubles))


def _name(iteration: int, load: Path, save: str | None) -> str | None:
    """Write the tracker where it is saved to, as well; return what hinders it."""
    if not save or Path(save).resolve() != load.resolve():
        return None
    try:
        write_durably(load / TRACKER, str(iteration))
    except OSError as error:
        return f"{load / TRACKER} cannot be written: {error.strerror or error}"
    return None
