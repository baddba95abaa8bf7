"""Outer training begins where Megatron has its model and optimizer, loaded or new.

Wraps `setup_model_and_optimizer`. After it the optimizer instance's `step` passes the boundaries;
weights that Megatron has loaded stay each cluster's own, and the outer state of that iteration is
loaded with them (checkpoint.py), if it is not of a run without dsx (synchronous.py). Before
anything is built it refuses, by flag, what is not served: once more (refusals.py), as a script's
defaults and a checkpoint's arguments are in force only now.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsx.engines.attach import attach_megatron
from dsx.engines.megatron.checkpoint import look_for_own
from dsx.engines.megatron.parameters import unwrapped
from dsx.engines.megatron.refusals import refuse_arguments, refuse_backend
from dsx.engines.megatron.settings import settings_of_arguments
from dsx.training.positions import SAMPLES
from megatron_patches import probe
from megatron_patches.batch_size import facts_of_batch, refuse_fixed_backwards
from megatron_patches.data import agree
from megatron_patches.fully_sharded import mend_checkpoints
from megatron_patches.joining import (
    Counters,
    loading_nothing,
    refuse_what_cannot_join,
    skip_what_others_loaded,
)
from megatron_patches.resume import choose_iteration
from megatron_patches.run import Run
from megatron_patches.save_directory import claim_directory
from megatron_patches.synchronous import begins_plain, counters_of, tell

_EQUAL = (
    "global_batch_size", "seq_length", "train_iters", "train_samples",
    "seed",  # of the order of samples, of which every cluster takes its part
    "save_interval", "exit_interval", "iterations_to_skip",
)  # fmt: skip


_OF_VALIDATION = ("eval_interval", "eval_iters")  # of an average, which all clusters take together


def patch(run: Run) -> None:
    """Attach after `setup_model_and_optimizer`."""
    training = probe.training()
    original = probe.function(training, "setup_model_and_optimizer", ["model_type"])

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        arguments = probe.arguments_in_force()
        refuse_arguments(arguments)
        refuse_backend(arguments.distributed_backend, dist.get_backend())
        if run.handle is None:
            claim_directory(run, arguments.save)
            refuse_what_cannot_join(run, arguments)
            if run.world.joins is None:
                choose_iteration(run, arguments)
        mend_checkpoints(arguments)
        with loading_nothing(run, arguments):
            made = original(*args, **kwargs)
        if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], list)):
            raise probe.UnknownMegatron(
                "setup_model_and_optimizer returned something else than (model, optimizer, "
                f"scheduler); checked: {probe.CHECKED}"
            )
        model, optimizer, scheduler = made
        if optimizer is not None and run.handle is None:
            _attach(run, model, optimizer, scheduler)
        return made

    training.setup_model_and_optimizer = setup_model_and_optimizer


class EndOfLoop:
    """Where a run is told to end, Megatron's loop saves and exits (training_end.py)."""

    needs_callback, ends_elsewhere, saves_when_asked = False, True, False

    def save(self, base: Path, tag: str) -> Path:
        """Refuse: another part of the script has asked for the end."""
        raise RuntimeError("Megatron-LM's loop saves by itself where the run is told to end")


def _attach(run: Run, model: Any, optimizer: Any, scheduler: Any) -> None:
    arguments = probe.arguments_in_force()
    joins = run.world.joins is not None
    if joins:
        skip_what_others_loaded(run)
    else:
        _require_same_start(run, arguments)
    equal = _EQUAL if run.validation == "own" else (*_EQUAL, *_OF_VALIDATION)
    facts = {name: getattr(arguments, name, None) for name in equal}
    facts |= facts_of_batch(arguments)
    refuse_fixed_backwards(arguments, run.config.method.schedule.backwards)
    is_plain = not joins and begins_plain(run, arguments)
    loaded = (arguments.load, arguments.iteration) if arguments.iteration else None
    source = f"--load {arguments.load}, iteration {arguments.iteration}"
    run.handle = attach_megatron(
        model,
        optimizer,
        config=run.block,
        resume=None if is_plain else loaded,
        begins_from=(source, counters_of(arguments, scheduler)) if is_plain else None,
        facts={"arguments": facts, "data": run.data, "validation": run.validation},
        settings={"arguments": settings_of_arguments(arguments)},
        tracked={SAMPLES: run.division.place},
        vocab_size=_vocab_size(arguments, model),
        own_part=arguments.save,
    )
    run.handle.preemption.engine = EndOfLoop()
    run.handle.joining.follows["megatron"] = Counters(run, scheduler)
    if run.own_checkpoints:
        look_for_own(run.handle, run.own_checkpoints)
    if iterations := getattr(arguments, "train_iters", None):
        total = run.handle.step + iterations - arguments.iteration
        run.handle.progress.note({"total_steps": total})
    if is_plain:
        tell(run, arguments)
    agree(run, arguments, is_plain)
    start = f"goes on from iteration {arguments.iteration}" if loaded else "starts"
    start = "is about to join the others" if joins else start
    method = run.config
    run.tell(
        f"{method.preset} {start}: {run.world.num_clusters} clusters, a sync every "
        f"{method.method.schedule.interval} steps, {len(run.handle.loop.adapter.fragments)} "
        "fragment(s) on this stage"
    )


def _vocab_size(arguments: Any, model: Any) -> int | None:
    """Return the tokenizer's vocabulary, which Megatron has padded.

    None where there is none, and of a model of several parts, which tells no rows of its own.
    """
    if not hasattr(unwrapped(model[0]), "vocab_size"):
        return None
    size = getattr(probe.tokenizer(), "vocab_size", None)
    padded = getattr(arguments, "padded_vocab_size", None)
    return size if isinstance(size, int) and padded and 0 < size <= padded else None


def _require_same_start(run: Run, arguments: Any) -> None:
    """Refuse, in all clusters, that some go on from a checkpoint and others start anew."""
    iterations = run.world.rendezvous.gather("loaded iteration", arguments.iteration)
    if 0 < iterations.count(0) < len(iterations):
        loaded = ", ".join(f"cluster {m}: {i or 'none'}" for m, i in enumerate(iterations))
        raise ValueError(
            f"some clusters have loaded a checkpoint and others none (iterations: {loaded}); give "
            "every cluster a --load of its own that holds the same iteration, or none"
        )
