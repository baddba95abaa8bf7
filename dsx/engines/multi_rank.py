"""What adapters of engines with several ranks per cluster have in common (see core/engine.py).

An adapter sets the attributes below when it is made. It adds what only it knows: where the masters
are, when in a step they are fresh, and how they reach the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsx.core.buffers import Buffers
from dsx.engines.backward_hooks import BackwardWatch
from dsx.engines.cluster_collectives import ClusterCollectives
from dsx.engines.copies import TensorParallelCopies
from dsx.engines.masters import MastersAdapter
from dsx.engines.replicated import ReplicaSets, ReplicaShards
from dsx.engines.tied_weights import TiedWeights


class SharedMasters(MastersAdapter):
    """Masters that several ranks may hold alike; what one has written, all of them gather."""

    # where ranks of a stage hold the same masters
    _replica_shards: ReplicaShards | ReplicaSets | None
    _copies: TensorParallelCopies | None = None
    _written: dict[int, None]  # fragments, since they were gathered last

    def end_write(self, fragment: int) -> None:
        """Note that this rank's masters of a fragment are other ones."""
        super().end_write(fragment)
        self._written[fragment] = None

    @property
    def buffer_bytes(self) -> int:
        """Return what gathering replica shards takes."""
        return 0 if self._replica_shards is None else self._replica_shards.buffer_bytes

    @property
    def buffers(self) -> Buffers:
        """Return where that comes from."""
        return Buffers() if self._replica_shards is None else self._replica_shards.buffers

    def _all_gather(self, fragments: Sequence[int]) -> None:
        """All-gather what the ranks have written. Collective: all have written the same ones."""
        if self._replica_shards is not None:
            self._replica_shards.all_gather(fragments)
        if self._copies is not None:
            self._copies.broadcast(fragments)
        self._written.clear()


class MultiRankAdapter(SharedMasters):
    """The masters of one rank; its stage's collectives are `ranks`."""

    ranks: ClusterCollectives
    _tied_weights: TiedWeights
    _members: list[list[Any]]  # by fragment, the model's trained parameters on this rank
    _watch: BackwardWatch | None = None

    def end_inner_step(self) -> None:
        """Start counting the gradients of the next inner step, if they are watched."""
        if self._watch is not None:
            self._watch.begin_step()

    def detach(self) -> None:
        """Nothing to do: an engine keeps its handle to its own end."""

    def backward_seconds(self, fragment: int) -> float | None:
        """Return the time between this fragment's gradients and those before them, last time."""
        return None if self._watch is None else self._watch.seconds[fragment]

    def _hold_members(
        self, assignment: Sequence[Sequence[str]], parameters: Mapping[str, Any]
    ) -> None:
        """Take the model's own parameters, whose gradients are watched, if a schedule asks."""
        self._members = [[parameters[n] for n in names if n in parameters] for names in assignment]

    def _follow_backward(
        self,
        modules: Sequence[Any],
        backwards: Callable[[], int],
        callback: Callable[[int], None],
    ) -> None:
        """Call back with a fragment when the last micro-batch's gradients of it have come.

        Masters rest from one optimizer step to the next, whatever the engine does with gradients
        meanwhile: what is launched then is what it would be at any other time in the step. So it
        is no mistake either if a fragment is complete too early, or not before the boundary.
        """
        self._watch = BackwardWatch(modules, self._members, backwards, callback, allows_more=True)

    def _synchronize_masters(self, was_written: bool) -> bool:
        """Send what this stage has written to all who hold it; return whether masters changed."""
        written = list(self._written)
        if was_written:
            self._all_gather(written)
        return self._tied_weights.broadcast(written) or was_written
