"""What outer training takes on a rank, from numbers alone: also for a run that is only planned.

With n fp32 elements of masters on the rank (its ZeRO shard), w of them as they travel (other than n
only where whole matrices are put together), b = 1 + rounds under way, L the largest fragment:

    anchor 4n, outer optimizer 4n per slot, or 2n in bf16, delay policy 4n per slot, but as the
    outer optimizer where it has the same, too (+ 4nb for what it keeps),
    staleness penalty, codec: residuals and warm starts, transfers 4wb (on the host, pinned),
    attempts: what is sent, kept as it was, 4w (on the host, pinned; transfers take turns with those
    vectors: arenas.py; where codes are made at the launch, they are kept instead, and where means
    leave their memory to launches, passing_on.py, those are all), and the codec's
    state of before the attempt under way, but for residuals that change at its end (low rank),
    channels: what comes from the others (of fp32 4w), codes, factors, what codecs work in (of
    factors once for all fragments, which take turns),
    work space: 2 vectors shared by all fragments; one more where local parameters, or penalties of
    single elements, go into the outer step, where norms of tensors are taken, and where means leave
    their memory to launches: of 2^20 elements on a host, of L where work_space.py says so; with
    slots in bf16 tiles in fp32, whole vectors where a clip measures tensors,
    in the cluster: pieces of matrices on their way (low rank under ZeRO), of 2^24 elements at a
    time each way, for all fragments; without ZeRO the gather of what R replicas have shared out:
    up to 64 MiB (1 + 1/R)

    factors: where an accelerator makes them, two pieces of a matrix and its factors there.

With the state on disk, all but transfers, channels, work space, what is in the cluster and factors
is in files there, and what is sent takes 4wb.

It is what `Allocator` has given (core/buffers.py), which tests compare. On an accelerator there are
also the contributions that are launched together, 4 bytes per element until they are on the host
(twice where pieces are put together); what lives only within a call (a QR of the largest factor,
the entries that top-k picks) is in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dsx.compress.slices import Sizes, exact_bytes, most_work
from dsx.core.exchange import HASHED_ON_ACCELERATOR, HASHED_PAIRS
from dsx.core.types import Fragment
from dsx.core.units import format_bytes
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterOptimizer, slot_dtypes
from dsx.outer.passing_on import passes_on
from dsx.outer.sideband import sideband_shape
from dsx.outer.work_space import work_lengths

StatePlace = Literal["masters", "host", "disk"]  # `state.device`
_AT_HAND = ("transfers", "channels", "work_space", "in_the_cluster", "factors")  # on no disk
ROUNDED_TOGETHER = 1 << 20  # elements of slots in bf16 that are stepped at a time
_NOISE_BYTES = 3 * 4  # of each of them
_HASH_BYTES = 2 * 8 * HASHED_PAIRS  # on the host: weights, and products


@dataclass(frozen=True)
class OuterMemory:
    """Bytes of one rank by what they are for; `codec` to `channels` are always on the host, and
    `factors` on an accelerator.
    """

    anchor: int
    outer_optimizer: int
    delay: int
    staleness: int
    codec: int
    transfers: int
    attempts: int
    channels: int
    work_space: int
    in_the_cluster: int
    factors: int = 0

    @property
    def total(self) -> int:
        """All of it, the work space fully in use."""
        return sum(vars(self).values())

    def on_host(self, place: StatePlace) -> int:
        """Return what lies in host memory."""
        if place == "masters":
            return self.codec + self.transfers + self.attempts + self.channels
        return self.total - self.factors - self.on_disk(place)

    def on_disk(self, place: StatePlace) -> int:
        """Return what lies in files."""
        if place != "disk":
            return 0
        return self.total - sum(getattr(self, name) for name in _AT_HAND)

    def on_device(self, place: StatePlace) -> int:
        """Return what lies with the masters, but for contributions on their way to the host.

        Of a state on the host or on disk, what factors are made in there.
        """
        return self.total - self.on_host(place) if place == "masters" else self.factors

    @property
    def copied_for_save(self) -> int:
        """What is copied at most, on the host, where a save is written beside training.

        Of anchors and the outer optimizer's as much as an outer step changes before it is written.
        Masters, where they are saved, are not in it.
        """
        own = self.anchor + self.outer_optimizer + self.delay + self.staleness
        return own + self.codec + self.transfers + self.attempts

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
    is_on_accelerator: bool = False,
    is_on_disk: bool = False,
    factors_are_there: bool | None = None,
) -> OuterMemory:
    """Return the bytes that a rank's outer state takes.

    `fragments` are the rank's, with `num_tensors` parameters in each whole fragment;
    `on_the_wire` the same as they travel; `in_the_cluster` is what the adapter and the gathers say.
    `is_on_accelerator`: outer steps are taken there, where 32 MiB more are hashed at a time.
    `is_on_disk`: the state is. `factors_are_there`: on the accelerator; None: if outer steps are.
    """
    numel = sum(f.numel for f in fragments)
    outer, delay, staleness = method.outer_optimizer, method.delay, method.staleness
    buffers = method.max_in_flight
    pairs = list(zip(fragments, num_tensors, strict=True))
    kept = buffers * numel if method.keeps is not None else 0
    of_staleness = sum(sum(staleness.slots(f, count).values()) for f, count in pairs)
    if method.keeps_round_start:
        of_staleness += numel
    sidebands = [sideband_shape(method, f, count, num_clusters).numel for f, count in pairs]
    wire = sum(f.numel for f in on_the_wire)
    of_clusters = _of_channels(method, on_the_wire, sidebands, num_clusters)  # by cluster
    codec, before, channels = of_clusters[:, of_clusters.sum(axis=0).argmax()].tolist()
    kept_of_sent = 0 if method.encodes_at_launch else buffers if is_on_disk else 1
    if passes_on(method, is_on_accelerator, is_on_disk):
        kept_of_sent = 0
    worked_in = work_lengths(method, fragments, is_on_accelerator, is_on_disk)
    longest = max((f.numel for f in fragments), default=0)
    if factors_are_there is None:
        factors_are_there = is_on_accelerator
    hashed = _HASH_BYTES
    if is_on_accelerator:
        hashed += 8 * HASHED_PAIRS * (HASHED_ON_ACCELERATOR - 1)
    return OuterMemory(
        anchor=4 * numel if outer.keeps_anchor else 0,
        outer_optimizer=slots_bytes(outer, outer.slots, numel),
        delay=slots_bytes(outer, delay.slots(outer.slots), numel) + 4 * kept,
        staleness=4 * of_staleness,
        codec=codec,
        transfers=4 * buffers * (wire + sum(sidebands)),
        attempts=4 * (kept_of_sent * wire + buffers * sum(sidebands)) + before,
        channels=channels,
        in_the_cluster=in_the_cluster,
        factors=_factors_bytes(method, on_the_wire) if factors_are_there else 0,
        work_space=4 * sum(worked_in.values())
        + _rounding_bytes(outer, longest)
        + hashed * (outer.keeps_anchor and bool(method.anchor_check_interval)),
    )


def _factors_bytes(method: Method, on_the_wire: Sequence[Fragment]) -> int:
    """Return the bytes that factors are made in on an accelerator, one fragment after another."""
    compression, rank = method.compression, method.control.largest_rank
    if not compression.makes_factors:
        return 0
    return most_work(compression.side_work(fragment, rank) for fragment in on_the_wire)


def slots_bytes(outer: OuterOptimizer, names: Sequence[str], numel: int) -> int:
    """Return the bytes of buffers of `numel` elements, some of which are the outer rule's."""
    kinds = slot_dtypes(outer, names).values()
    return numel * sum({"float32": 4, "bfloat16": 2}[kind] for kind in kinds)


def _rounding_bytes(outer: OuterOptimizer, longest: int) -> int:
    """Return what slots in bf16 are stepped and rounded in (outer_update.py)."""
    if outer.state_dtype == "fp32":
        return 0
    tile = min(longest, ROUNDED_TOGETHER)
    in_fp32 = longest if outer.measures_tensors else tile
    return 4 * len(outer.slots) * in_fp32 + _NOISE_BYTES * tile


def _of_channels(
    method: Method, on_the_wire: Sequence[Fragment], sidebands: Sequence[int], num_clusters: int
) -> Sizes:
    """Return what each cluster's channels keep for a checkpoint, of before, and hold beside it."""
    compression, rank = method.compression, method.control.largest_rank
    at_launch = method.max_in_flight if method.encodes_at_launch else 0
    shared = max((compression.shared_work_bytes(f) for f in on_the_wire), default=0)
    found = np.zeros((3, num_clusters), dtype=np.int64)
    in_turn: dict[str, Sizes] = {}
    for fragment in on_the_wire:
        for role, sizes in compression.work_in_turn(fragment, num_clusters, rank).items():
            in_turn[role] = np.maximum(in_turn.get(role, 0), sizes)
    found[2] = shared + sum(in_turn.values())
    for fragment, sideband in zip(on_the_wire, sidebands, strict=True):
        state = compression.state_bytes(fragment, num_clusters, rank)
        copies = compression.before_bytes(fragment, num_clusters, rank, at_launch)
        buffers = compression.buffer_bytes(fragment, num_clusters, rank, at_launch)
        found += np.array([state, copies, buffers])
        found[2] += exact_bytes(sideband, num_clusters)
        found[2] += _HASH_BYTES if fragment.numel else 0
    return found
