"""A warning where clusters seem to read the same batches: the first mean is each one's own."""

from __future__ import annotations

import logging

from dsx.outer.loop import Event, OuterLoop

logger = logging.getLogger(__name__)


def warn_of_same_batches(loop: OuterLoop, event: Event) -> None:
    """Warn, by the event of a first sync; only where progress is sent, not parameters."""
    sends_progress = loop.method.delay.needs_anchor
    if event["round"] == 1 and loop.transport.seat.num_clusters > 1 and sends_progress:
        own, mean = float(event["pseudo_gradient_norm"]), float(event["mean_norm"])
        if own == mean != 0:
            logger.warning(
                "the mean pseudo-gradient of %s equals this cluster's own: do all "
                "clusters read the same batches? dsx.data.ClusterShard splits a dataset",
                loop.adapter.stage.name_of(event["fragment"]),
            )
