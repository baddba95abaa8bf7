"""What outer training takes on a rank, from numbers alone: also for a run that is only planned.

With n fp32 elements of masters on the rank (its ZeRO shard), w of them as they travel (other than n
only where whole matrices are put together), b = 1 + rounds under way, L the largest fragment:

    anchor 4n, outer optimizer 4n per slot, delay policy 4n per slot (+ 4nb for what it keeps),
    staleness penalty, codec: residuals and warm starts, transfers 4wb (on the host, pinned),
    work space: up to 4 vectors of L, shared by all fragments
    in the cluster: pieces of matrices on their way (low rank under ZeRO: 4 bytes each, both ways),
    without ZeRO the gather of what R replicas have shared out: up to 64 MiB (1 + 1/R)

Codecs' own buffers (codes of one round, C of them where they are gathered) come on top of it: at
most C + 1 times the bytes of one message; on an accelerator the contributions that are launched
together, 4 bytes per element until they are on the host (twice where pieces are put together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsx.core.types import Fragment
from dsx.core.units import format_bytes
from dsx.method.method import Method
from dsx.outer.sideband import sideband_shape

_MOST_SCRATCH = 4


@dataclass(frozen=True)
class OuterMemory:
    """Bytes of one rank by what they are for; `codec` and `transfers` are always on the host."""

    anchor: int
    outer_optimizer: int
    delay: int
    staleness: int
    codec: int
    transfers: int
    work_space: int
    in_the_cluster: int

    @property
    def total(self) -> int:
        """All of it, the work space fully in use."""
        return sum(vars(self).values())

    def on_host(self, is_state_on_host: bool) -> int:
        """Return what lies in host memory, state placed there or with the masters."""
        return self.total if is_state_on_host else self.codec + self.transfers

    def __str__(self) -> str:
        named = [(name.replace("_", " "), size) for name, size in vars(self).items() if size]
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in named)
        return f"{format_bytes(self.total)} ({parts})"


def predict(
    method: Method,
    fragments: Sequence[Fragment],
    num_tensors: Sequence[int],
    on_the_wire: Sequence[Fragment],
    num_clusters: int,
    in_the_cluster: int = 0,
) -> OuterMemory:
    """Return the bytes that a rank's outer state takes.

    `fragments` are the rank's, with `num_tensors` parameters in each whole fragment;
    `on_the_wire` the same as they travel; `in_the_cluster` is what the adapter and the gathers say.
    """
    numel = sum(f.numel for f in fragments)
    outer, delay, staleness = method.outer_optimizer, method.delay, method.staleness
    buffers = method.max_in_flight
    pairs = list(zip(fragments, num_tensors, strict=True))
    kept = buffers * numel if delay.keeps is not None else 0
    of_staleness = sum(sum(staleness.slots(f, count).values()) for f, count in pairs)
    if method.keeps_round_start:
        of_staleness += numel
    sideband = sum(sideband_shape(method, f, count, num_clusters).numel for f, count in pairs)
    wire = sum(f.numel for f in on_the_wire)
    rank = method.control.largest_rank
    codec = [method.compression.state_bytes(f, num_clusters, rank) for f in on_the_wire]
    return OuterMemory(
        anchor=4 * numel if outer.keeps_anchor else 0,
        outer_optimizer=4 * numel * len(outer.slots),
        delay=4 * (numel * len(delay.slots(outer.slots)) + kept),
        staleness=4 * of_staleness,
        codec=max(map(sum, zip(*codec, strict=True)), default=0),
        transfers=4 * buffers * (wire + sideband),
        in_the_cluster=in_the_cluster,
        work_space=4 * _MOST_SCRATCH * max((f.numel for f in fragments), default=0),
    )
