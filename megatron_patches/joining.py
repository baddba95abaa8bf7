"""A cluster that is started again joins the run of the others, where Megatron's loop begins.

All that is built before that is as in a new run: nothing is loaded, for what the others hold is
newer than any checkpoint. Then, in place of `train`'s first line, the cluster comes to where they
are (dsx/outer/healing.py), and with it what the loop counts by: the iteration, the samples and the
schedule of the rates. Loaders, which are built by then, are begun anew at the place of the others
in the data. What is drawn (dropout) comes from seeds that follow from the first ones and the step.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megatron_patches import probe
from megatron_patches.batch_size import count_by_own, left_out
from megatron_patches.run import Run

_BEFORE_LOADING = ("resume point", "loaded iteration", "whose checkpoint")
_SEEDS_APART = 1_000_003  # of two steps that follow each other


@contextmanager
def loading_nothing(run: Run, arguments: Any) -> Generator[None, None, None]:
    """Let Megatron load nothing inside, if this cluster joins a run that goes on."""
    if run.world.joins is None:
        yield
        return
    names = "load", "pretrained_checkpoint"
    own = {name: getattr(arguments, name, None) for name in names}
    if own["load"]:
        run.own_checkpoints = own["load"]
        run.tell(
            f"--load {own['load']} is not loaded: the run goes on, and holds what is newer; what "
            "is the same there is not fetched from the others"
        )
    vars(arguments).update(dict.fromkeys(names))
    try:
        yield
    finally:
        vars(arguments).update(own)


def refuse_what_cannot_join(run: Run, arguments: Any) -> None:
    """Raise ValueError, by flag, for what cannot be brought to where the others are."""
    if run.world.joins is None:
        return
    why = {
        "--dataloader-type external": (
            arguments.dataloader_type == "external", "reads data in its own way"
        ),
        "--phase-transition-iterations": (
            bool(getattr(arguments, "phase_transition_iterations", None)),
            "builds data by the iteration at which the run has begun",
        ),
        "--perform-rl-step": (
            bool(getattr(arguments, "perform_rl_step", False)), "trains on what it makes itself"
        ),
    }  # fmt: skip
    for flag, (is_given, reason) in why.items():
        if is_given:
            raise ValueError(
                f"a run goes on, which cluster {run.world.cluster_id} would join: {flag} {reason}, "
                "which dsx cannot bring to where the others are; end them (dsx ctl stop: all "
                "save), and start all clusters again"
            )


def skip_what_others_loaded(run: Run) -> None:
    """Pass over what the others have compared of their checkpoints as they began."""
    run.world.rendezvous.skip(_BEFORE_LOADING)


class Counters:
    """What Megatron's loop counts by, as of the boundary being passed: within an iteration."""

    def __init__(self, run: Run, scheduler: Any) -> None:
        self._run, self._scheduler = run, scheduler
        self.joined: dict[str, int] = {}  # what others have told

    def place_here(self) -> dict[str, int]:
        """Return where the loop will be once this iteration is over."""
        arguments = probe.arguments_in_force()
        iteration, batch = arguments.curr_iteration + 1, self._batch(arguments)
        consumed_valid = arguments.consumed_valid_samples
        interval = arguments.eval_interval
        if interval and arguments.eval_iters and not iteration % interval:
            consumed_valid += arguments.eval_iters * self._eval_batch(arguments)
        return {
            "iteration": iteration,
            "consumed_train_samples": arguments.consumed_train_samples + batch,
            "skipped_train_samples": getattr(arguments, "skipped_train_samples", 0) + left_out(),
            "consumed_valid_samples": consumed_valid,
            "scheduled": self._scheduler.num_steps + batch,
        }

    def go_where_others_are(self, place: dict[str, int]) -> None:
        """Set all of it, before the loop begins."""
        arguments = probe.arguments_in_force()
        self.joined = place
        for name in place.keys() - {"scheduled"}:
            setattr(arguments, name, place[name])
        count_by_own(arguments)
        self._scheduler.step(increment=place["scheduled"] - self._scheduler.num_steps)
        trained = place["consumed_train_samples"] - place["skipped_train_samples"]
        count = probe.function(probe.training(), "num_floating_point_operations", ["args"])
        arguments.num_floating_point_operations_so_far = count(arguments, trained)
        _draw_anew(place["iteration"])

    def _batch(self, arguments: Any) -> int:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        ranks = parallel_state.get_data_parallel_world_size()
        return get_num_microbatches() * arguments.micro_batch_size * ranks

    def _eval_batch(self, arguments: Any) -> int:
        return getattr(arguments, "eval_global_batch_size", None) or arguments.global_batch_size


def join_if_due(run: Run, train_data: Any, valid_data: Any) -> None:
    """Come to where the others are, with the iterators of the data. Collective in the cluster."""
    handle = run.handle
    if handle is None or not handle.joining.is_due:
        return
    handle.settle()
    arguments, division = probe.arguments_in_force(), run.division
    place = division.place.of(arguments.consumed_train_samples, division.parts)
    train_loaders, valid_loaders, _ = division.loaders
    _read_from(train_data, train_loaders, place)
    if not getattr(arguments, "full_validation", False):  # which begins anew each time
        _read_from(valid_data, valid_loaders, arguments.consumed_valid_samples)
    if iterations := getattr(arguments, "train_iters", None):
        total = handle.step + iterations - arguments.iteration
        handle.progress.note({"total_steps": total})
    run.tell(
        f"joined: goes on from iteration {arguments.iteration}, behind "
        f"{arguments.consumed_train_samples:,} samples of its own"
    )


def _read_from(iterators: Any, loaders: list[Any], place: int) -> None:
    """Let iterators go on at a place: one, or those of several chunks, in the order of loaders."""
    every = iterators if isinstance(iterators, list) else [iterators]
    held = [one for one in every if one is not None]
    if len(held) != len(loaders):
        raise probe.UnknownMegatron(
            f"{len(held)} data iterators of {len(loaders)} loaders; checked: {probe.CHECKED}"
        )
    for iterator, loader in zip(held, loaders, strict=True):
        if not hasattr(iterator, "iterable"):
            raise probe.UnknownMegatron(
                f"{type(iterator).__name__} has no `iterable`; checked: {probe.CHECKED}"
            )
        loader.batch_sampler.consumed_samples = place
        is_cyclic = probe.arguments_in_force().dataloader_type == "cyclic"
        begin = probe.training().cyclic_iter if is_cyclic else iter
        iterator.iterable = iter(begin(loader))


def _draw_anew(iteration: int) -> None:
    """Seed all generators by their first seeds and the iteration: no draw is made twice."""
    from megatron.core import tensor_parallel

    def seed(first: int) -> int:
        return (first + _SEEDS_APART * iteration) % (1 << 63)

    own, of_device = torch.initial_seed(), torch.cuda.initial_seed()
    random.seed(seed(own))
    np.random.seed(seed(own) % (1 << 32))
    torch.manual_seed(seed(own))
    torch.cuda.manual_seed(seed(of_device))
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            torch.cuda.manual_seed(seed(torch.cuda.initial_seed()))
