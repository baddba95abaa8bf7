"""A warning where clusters seem to read the same batches: the first mean is each one's own."""

from __future__ import annotations

import logging
import math

from dsx.core.host_numbers import HostNumbers
from dsx.outer.loop import Event, OuterLoop

logger = logging.getLogger(__name__)
_SAME = 1e-4  # of norms of one vector, added up on the host and on a device


class SameBatches:
    """Looks at the first sync of each fragment, as soon as its numbers are there."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        self._unseen: list[HostNumbers] = []

    def see(self, event: Event) -> None:
        """Warn, by the events of first syncs; only where progress is sent, not parameters."""
        sends_progress = self._loop.method.delay.needs_anchor
        is_first = event["round"] == 1 and self._loop.transport.seat.num_clusters > 1
        if is_first and sends_progress:
            self._unseen.append(HostNumbers(event))
        while self._unseen and self._unseen[0].are_there:
            first = self._unseen.pop(0).read()
            own, mean = first["pseudo_gradient_norm"], first["mean_norm"]
            if mean and math.isclose(own, mean, rel_tol=_SAME):
                logger.warning(
                    "the mean pseudo-gradient of %s equals this cluster's own: do all "
                    "clusters read the same batches? dsx.data.ClusterShard splits a dataset",
                    self._loop.adapter.stage.name_of(first["fragment"]),
                )
