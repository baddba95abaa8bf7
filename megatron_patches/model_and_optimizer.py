"""Outer training begins where Megatron has its model and optimizer, loaded or new.

Wraps `setup_model_and_optimizer`. After it the optimizer instance's `step` passes the boundaries;
weights that Megatron has loaded stay each cluster's own, and the outer state of that iteration is
loaded with them (checkpoint.py). Refuses, by flag, what would go around the wraps.
"""

from __future__ import annotations

import functools
from typing import Any

from dsx.attach import attach_megatron
from dsx.backends.megatron_features import refuse_arguments
from megatron_patches import probe
from megatron_patches.checkpoint import claim_directory
from megatron_patches.run import Run

_REFUSED = {
    "hybrid_context_parallel": "its sampler is not split between clusters yet",
    "non_persistent_save_interval": "outer state is saved with persistent checkpoints only",
    "rampup_batch_size": "samples are counted per cluster with one batch size only",
}
_EQUAL = ("global_batch_size", "micro_batch_size", "seq_length", "train_iters", "train_samples")


def patch(run: Run) -> None:
    """Attach after `setup_model_and_optimizer`."""
    training = probe.training()
    original = probe.function(training, "setup_model_and_optimizer", ["model_type"])

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        _refuse(probe.arguments_in_force())
        made = original(*args, **kwargs)
        if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], list)):
            raise probe.UnknownMegatron(
                "setup_model_and_optimizer returned something else than (model, optimizer, "
                f"scheduler); checked: {probe.CHECKED}"
            )
        model, optimizer, _ = made
        if optimizer is not None and run.handle is None:
            _attach(run, model, optimizer)
        return made

    training.setup_model_and_optimizer = setup_model_and_optimizer


def _attach(run: Run, model: Any, optimizer: Any) -> None:
    arguments = probe.arguments_in_force()
    if arguments.save:
        claim_directory(run, arguments.save)
    facts = {name: getattr(arguments, name, None) for name in _EQUAL}
    resume = (arguments.load, arguments.iteration) if arguments.iteration else None
    run.handle = attach_megatron(
        model, optimizer, config=run.block, resume=resume, facts={"arguments": facts}
    )
    start = f"goes on from iteration {arguments.iteration}" if resume else "starts"
    method = run.config
    run.tell(
        f"{method.preset} {start}: {run.world.num_clusters} clusters, a sync every "
        f"{method.method.schedule.interval} steps, {len(run.handle.loop.backend.fragments)} "
        "fragment(s) on this stage"
    )


def _refuse(arguments: Any) -> None:
    refuse_arguments(arguments)
    for name, reason in _REFUSED.items():
        if getattr(arguments, name, None):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} does not work with dsx: {reason}; leave it out")
