"""A boundary that this cluster has left before all that was due had been applied, for a save.

Whoever goes on from there applies it before the next inner step: a process that has loaded what was
saved, or the same one, if it has waited. `outer/deferral.py` has what one rank puts off.
"""

from __future__ import annotations

from dsx.comm.world import World
from dsx.outer.loop import OuterLoop


class OpenBoundary:
    """One rank's; all ranks of the cluster call the same."""

    def __init__(self, world: World, loop: OuterLoop) -> None:
        self._world, self._loop = world, loop
        self._is_open = False  # on any rank of this cluster

    def look(self) -> bool:
        """Take whether any rank has left something, and return it. Collective in the cluster."""
        is_open = self._loop.deferral.is_deferred
        self._is_open = self._world.in_cluster().any("what was put off", is_open)
        return self._is_open

    def end(self, may_stop: bool = False) -> None:
        """Apply what was left, and bring it to the model. Waits for the other clusters.

        `may_stop`: what is not there when a stop is asked for is put off again.
        """
        if self._is_open:
            self._is_open = False
            if not may_stop:
                self._loop.end_boundary()
            elif self._loop.deferral.is_deferred:
                self._loop.apply_ripe()
            self._loop.adapter.sync_model_weights()
