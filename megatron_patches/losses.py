"""Megatron's loss, for the bounds of `divergence`: the loop itself tells nobody of it.

Wraps `train_step`, where a bound is set, and passes on what it takes and returns. The loss is on
the ranks of the last pipeline stage, averaged over the cluster's data-parallel ranks: `lm loss`, or
the largest one where a script reports none of that name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megatron_patches import probe
from megatron_patches.run import Run

_MAIN = "lm loss"


def patch(run: Run) -> None:
    """Tell the handle of each step's loss, if there is a bound for it."""
    divergence = run.config.divergence
    if divergence.max_loss is None and divergence.max_loss_factor is None:
        return
    training = probe.training()
    original = probe.function(training, "train_step")

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        losses = result[0] if isinstance(result, tuple) and result else None
        if not isinstance(losses, Mapping):
            raise probe.UnknownMegatron(
                "train_step returned something else than (losses, ...), which the bounds of "
                f"dsx.divergence need: leave these out; checked: {probe.CHECKED}"
            )
        if run.handle is not None and losses:  # of the last stage
            run.handle.log_step(loss=_chosen(losses))
        return result

    training.train_step = train_step


def _chosen(losses: Mapping[str, Any]) -> float:
    values = {name: float(value) for name, value in losses.items()}
    if _MAIN in values:
        return values[_MAIN]
    return next((value for value in values.values() if value != value), max(values.values()))
