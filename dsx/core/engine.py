"""What the outer loop asks of an inner engine: its fp32 masters, as fragments, and a clock.

An adapter owns the knowledge of where an engine keeps its fp32 master parameters on this rank,
when in a step they are fresh, and how a change reaches the model's own (bit16) weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dsx.core.buffers import Buffers
from dsx.core.recorder import ComputeRecorder
from dsx.core.types import BackwardTrigger, Fragment, ParameterShape, Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ClusterRanks(Protocol):
    """The ranks of a cluster that share the same fragments, and what they tell each other.

    All but `shard` is collective over them, and over the other stages' too where it says so.
    """

    @property
    def shard(self) -> tuple[int, int]:
        """This rank's number among them, and how many they are."""
        ...

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the sum of the shards' values, in rank order; where ranks hold copies, one's own.

        The same bits on all.
        """
        ...

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise largest of the shards' values."""
        ...

    def max_and_sum(self, values: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elementwise largest of `values`, and the sum of `summed` in rank order.

        On the CPU, fp64; the same bits on all. Where ranks hold copies, each is counted.
        """
        ...

    def max_over_stages(self, values: Tensor) -> Tensor:
        """Return the elementwise largest of all of a pipeline's ranks, on the CPU."""
        ...

    def begin_max_over_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        """Start `max_over_ranks` without waiting; the result is for any thread, once."""
        ...

    def gather(self, value: Any) -> Sequence[Any]:
        """Return every shard's plain value, in rank order."""
        ...

    def layouts(self, own: Sequence[Fragment]) -> tuple[Sequence[Sequence[Fragment]], int]:
        """Return the fragments of every rank, and this rank's number.

        One entry, its own, where every rank holds all of the parameters.
        """
        ...

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send `outgoing[r]` to shard r, fill `incoming[r]` from it; fp32 vectors."""
        ...


class EngineAdapter(Protocol):
    """One rank's view of the inner engine."""

    @property
    def fragments(self) -> Sequence[Fragment]:
        """This rank's layout; the ids are the same on every rank of a stage."""
        ...

    @property
    def fragment_numel(self) -> Sequence[int]:
        """Elements of each whole fragment, wherever in the stage they lie."""
        ...

    @property
    def fragment_parameters(self) -> Sequence[Sequence[ParameterShape]]:
        """The whole parameters of each fragment, wherever in the stage they lie."""
        ...

    @property
    def stage(self) -> Stage:
        """The pipeline stage this rank belongs to."""
        ...

    @property
    def ranks(self) -> ClusterRanks:
        """The ranks of the cluster that share this one's fragments."""
        ...

    @property
    def tells_model(self) -> bool:
        """Whether flags of its own tell the model's sizes, as Megatron's do."""
        ...

    @property
    def device(self) -> torch.device:
        """Where outer state lives: with the masters, or on the host if that was asked for."""
        ...

    @property
    def pins_host_memory(self) -> bool:
        """Whether masters are on an accelerator: copies to and from it want pinned memory."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Return what the adapter allocates for collectives inside the cluster."""
        ...

    @property
    def buffers(self) -> Buffers:
        """Return where it takes that from, when it is first needed."""
        ...

    def read(self, fragment: int, out: Tensor, start: int = 0) -> None:
        """Copy the masters of a fragment into `out` `[n]`, in place, from element `start` on."""
        ...

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite the masters of a fragment, in place, with `source` `[numel]`."""
        ...

    def in_a_row(self, fragment: int, start: int, stop: int) -> Tensor | None:
        """Return the live masters from `start` to `stop`, fp32 `[stop - start]`, to be changed.

        None where they do not lie in a row on `device`; else not to be kept, and whoever has
        changed them calls `end_write`.
        """
        ...

    def write_part(self, fragment: int, source: Tensor, start: int) -> None:
        """Overwrite masters of a fragment from `start` on with `source` `[n]`; see `end_write`."""
        ...

    def end_write(self, fragment: int) -> None:
        """Behind the last part of a fragment that was changed: bring it to where it is used."""
        ...

    def sync_model_weights(self) -> None:
        """Copy written masters to the model's weights outside an optimizer step.

        Collective inside the cluster: every rank calls it, also one that wrote nothing.
        """
        ...

    def inner_lr(self) -> float:
        """Return the learning rate of the inner step just taken (first parameter group)."""
        ...

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Call back with a fragment when all its gradients of this inner step are complete.

        With `when="after"` its optimizer step has then been taken. ValueError where the engine
        does not allow it.
        """
        ...

    def trace_compute(self, trace: ComputeRecorder) -> None:
        """Record what the engine does in its steps; called at most once, before training."""
        ...

    def end_inner_step(self) -> None:
        """Stop counting this step's gradients; called at a boundary the engine did not pass."""
        ...

    def detach(self) -> None:
        """Let go of the engine, which takes its steps alone from now on; called at the end."""
        ...

    def backward_seconds(self, fragment: int) -> float | None:
        """Return what the fragment's backward took last, if it is watched and has run."""
        ...
