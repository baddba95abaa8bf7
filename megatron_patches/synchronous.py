"""A `--load` of a run without dsx: every cluster begins from it, with all that Megatron loads.

Wraps `check_checkpoint_args`, which is called with the arguments that a checkpoint was saved with:
those of a run across clusters have flags of dsx among them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.checkpoint.tags import cluster_directory, complete_tags
from dsx.engines.megatron.own_part import tag_of
from megatron_patches import probe
from megatron_patches.run import Run


def patch(run: Run) -> None:
    """Note whether what Megatron loads was saved by a run across clusters."""
    loading = probe.module("megatron.training.checkpointing")
    original = probe.function(loading, "check_checkpoint_args", ["checkpoint_args"])

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        run.has_loaded_own |= any(name.startswith("dsx_") for name in vars(checkpoint_args))
        return original(checkpoint_args, *args, **kwargs)

    loading.check_checkpoint_args = check_checkpoint_args


def begins_plain(run: Run, arguments: Any) -> bool:
    """Whether Megatron has loaded a checkpoint of a run without dsx. Collective over all clusters.

    One of dsx's in any cluster is not: what does not fit is told where its outer state is loaded.
    """
    own = False
    if arguments.iteration:
        base = cluster_directory(Path(arguments.load) / "dsx", run.world.cluster_id)
        tags = [tag.split(".")[0] for tag in complete_tags(base)]
        own = run.has_loaded_own or tag_of(arguments.iteration) in tags
    is_own = run.world.rendezvous.gather("whose checkpoint", own)
    return bool(arguments.iteration) and not any(is_own)


def counters_of(arguments: Any, scheduler: Any) -> dict[str, Any]:
    """Return what all clusters must have loaded alike, beside weights and optimizer states."""
    names = "iteration", "consumed_train_samples", "no_load_optim"
    state: Mapping[str, Any] = scheduler.state_dict() if scheduler is not None else {}
    schedule = {f"schedule.{name}": value for name, value in state.items()}
    return {**{name: getattr(arguments, name, None) for name in names}, **schedule}


def require_place(arguments: Any, is_split: bool, before: str) -> None:
    """Raise ValueError where the place in shared data is not a number of samples in one order.

    `before` says whose checkpoint it is, behind whose samples clusters go on.
    """
    refused = {
        "--dataloader-type cyclic": (
            arguments.dataloader_type == "cyclic",
            "orders samples by the number of data-parallel ranks: use --dataloader-type single",
        ),
        "--phase-transition-iterations": (
            bool(getattr(arguments, "phase_transition_iterations", None)),
            "counts samples by phases of one world: leave it out",
        ),
    }
    for flag, (is_given, why) in refused.items():
        if is_given and is_split:
            raise ValueError(
                f"{flag} {why}; or begin from the weights alone (--finetune): --load "
                f"{arguments.load} is of {before}: clusters go on behind what it has read"
            )


def tell(run: Run, arguments: Any) -> None:
    """Say what the run begins from, and if it has been further already."""
    taken = "weights, optimizer states and schedule"
    if getattr(arguments, "no_load_optim", False):
        taken = "weights (--no-load-optim: new optimizer states and schedule)"
    run.tell(
        f"begins from {arguments.load}, iteration {arguments.iteration} of a run without dsx: "
        f"{taken} are taken in every cluster, and iterations go on; outer training begins anew"
    )
    base = arguments.save and cluster_directory(Path(arguments.save) / "dsx", run.world.cluster_id)
    if base and (tags := complete_tags(base)):
        run.tell(f"{arguments.save} holds {max(tags)} of dsx: to go on from that, --load it")
