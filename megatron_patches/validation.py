"""Whose loss a validation prints: this cluster's, that of the clusters' average, or both.

Wraps `evaluate_and_print_results`. For both, the batches of the first pass are kept in host memory
and read again, so that the two losses are of the same tokens. The average costs what an export
does: nothing on the wire where the method keeps an anchor, else the model in fp32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from megatron_patches import probe
from megatron_patches.run import Run
from megatron_patches.tree import TAKEN_TO_PRINT

AVERAGE = "(average of the clusters)"


class Kept:
    """An iterator of batches that can be read once more from where it was taken over."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._kept: list[Any] = []
        self._again: Iterator[Any] | None = None

    def __iter__(self) -> Kept:
        return self

    def __next__(self) -> Any:
        if self._again is not None:
            return next(self._again)
        batch = next(self._batches)
        self._kept.append(batch)
        return batch

    def rewind(self) -> None:
        """Read again what has been read, and no more."""
        self._again, self._kept = iter(self._kept), []


def patch(run: Run) -> None:
    """Validate what `clusters.validation` says."""
    training = probe.training()
    original = probe.function(training, "evaluate_and_print_results", TAKEN_TO_PRINT)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        handle = run.handle
        if handle is not None and handle.preemption.is_due:
            return None  # the run is told to end: no time for it
        if handle is None or run.validation == "own":
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if run.validation == "both":
            given["data_iterator"] = kept = _keep(given["data_iterator"])
            original(*call.args, **call.kwargs)
            _rewind(kept)
            given["write_to_tensorboard"] = False  # the cluster's own has that name and step
        given["prefix"] = f"{given['prefix']} {AVERAGE}"
        arguments = probe.arguments_in_force()
        consumed = arguments.consumed_valid_samples
        with handle.averaged():
            result = original(*call.args, **call.kwargs)
        if run.validation == "both":
            arguments.consumed_valid_samples = consumed  # the same batches again
        return result

    training.evaluate_and_print_results = evaluate_and_print_results


def _keep(batches: Any) -> Any:
    """Wrap an iterator, or those of several chunks or sets; None on ranks that read nothing."""
    if isinstance(batches, list):
        return [_keep(one) for one in batches]
    return None if batches is None else Kept(batches)


def _rewind(kept: Any) -> None:
    for one in kept if isinstance(kept, list) else [kept]:
        if one is not None:
            one.rewind()
