"""What coding takes of a transfer's thread: of a codec's choices, at the speeds of one core.

`dsx plan --from-run` takes the speed of a run's own codec from what its coding took.
"""

from __future__ import annotations

from dataclasses import replace

from dsx.compress.base import Compressor, Dense
from dsx.compress.low_rank import LowRank
from dsx.compress.owners import two_sides
from dsx.compress.quantized import Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.compress.slices import GATHERED_UP_TO
from dsx.compress.top_k import TopK
from dsx.core.types import Fragment, Slot, runs_of
from dsx.plan.link import Costs

_NUMEL = 10**6  # of the transfer whose coding is compared


def coding_seconds(
    fragment: Fragment, compression: Compressor, rank: int, num_clusters: int, costs: Costs
) -> tuple[float, float]:
    """Return a transfer thread's seconds before its first byte leaves, and after the last came.

    A copy, a sum and the parity check's hash go at the speed of memory; the small rest is left out.
    Of a codec that came from outside, whose speed is not known, they are all that is counted.
    """
    passes = 4 * fragment.numel / costs.copy_bytes_per_second
    if isinstance(compression, RandomTopK):
        return _picked_seconds(fragment, compression, num_clusters, costs)
    if not isinstance(compression, (Quantized, TopK)):
        return passes, 3 * passes  # from the masters; a sum, divided, the hash
    before, after, runs = passes, 2 * passes, fragment.coded_runs
    if isinstance(compression, LowRank):
        taken, rest = compression.split(fragment)
        runs = runs_of(rest)
        flops = sum(2 * m * n * min(rank, m, n) for m, n in map(two_sides, taken))
        rate = costs.flops * (costs.cores or 1)  # factors take turns: each has all of them
        before += flops / rate
        after += 2 * flops / rate
    coded = 4 * sum(stop - start for start, stop in runs)
    wire = "int8" if isinstance(compression, TopK) else compression.wire
    if wire not in costs.formats:  # fp32 is a copy
        return before + coded / costs.copy_bytes_per_second, after
    speeds = costs.formats[wire]
    has_feedback = compression.error_feedback != "none"
    before += coded / (speeds.encode_with_feedback if has_feedback else speeds.encode)
    if isinstance(compression, TopK) or num_clusters <= GATHERED_UP_TO:
        return before, after + num_clusters * coded / speeds.decode
    mean = costs.formats.get(compression.mean_wire, speeds)
    own = coded / num_clusters
    is_kept = compression.kept_of_means != "none"
    after += own / (mean.encode_with_feedback if is_kept else mean.encode)
    after += num_clusters * own / speeds.decode + coded / mean.decode
    return before, after


def coded_at_once(compression: Compressor, costs: Costs) -> int | None:
    """Return how many transfers of a rank may code at a time; None: all that are under way."""
    return 1 if compression.takes_turns and costs.cores else costs.cores


def _picked_seconds(
    fragment: Fragment, compression: RandomTopK, num_clusters: int, costs: Costs
) -> tuple[float, float]:
    """Return those of randomly picked elements: selecting goes at int8's speed, like top-k's.

    A residual is a pass over all elements more, to and fro.
    """
    passes = 4 * fragment.numel / costs.copy_bytes_per_second
    speeds, runs = costs.formats["int8"], fragment.coded_runs
    picked = 4 * sum(compression.num_picked(stop - start) for start, stop in runs)
    before = (1 if compression.error_feedback == "none" else 3) * passes
    before += picked / speeds.encode_with_feedback
    after = 2 * passes + picked * min(num_clusters, 2) / speeds.decode
    if num_clusters > GATHERED_UP_TO:  # slices' means are coded again
        after += picked / num_clusters / speeds.encode_with_feedback
    else:
        after += picked * (num_clusters - min(num_clusters, 2)) / speeds.decode
    return before, after


def share_seconds(
    fragment: Fragment, compression: Compressor, num_clusters: int, costs: Costs
) -> float:
    """Return what a thread takes to encode a launch, and to decode its own share.

    Where a delay needs the share (`Method.encodes_at_launch`); copies to the host and back are in.
    The training thread is it where `Method.waits_for_codes`.
    """
    before, _ = coding_seconds(fragment, compression, 0, num_clusters, costs)
    seconds = before + 4 * fragment.numel / costs.copy_bytes_per_second
    if isinstance(compression, RandomTopK):
        picked = sum(compression.num_picked(stop - start) for start, stop in fragment.coded_runs)
        return seconds + 4 * picked / costs.formats["int8"].decode
    if not isinstance(compression, (Quantized, TopK)):
        return seconds
    wire = "int8" if isinstance(compression, TopK) else compression.wire
    coded = 4 * sum(stop - start for start, stop in fragment.coded_runs)
    speed = costs.formats[wire].decode if wire in costs.formats else costs.copy_bytes_per_second
    return seconds + coded / speed


def slowdown_of(
    compression: Compressor,
    num_clusters: int,
    seconds_per_element: float,
    costs: Costs,
    makes_share: bool = False,
) -> float | None:
    """Return how many times as long a run's coding took as `costs` say.

    `makes_share`: what is decoded of a cluster's own codes, and its copies, are in it.
    None for codecs whose seconds depend on more than elements: factors, and picked ones.
    """
    if type(compression) not in (Dense, Quantized):
        return None
    fragment = Fragment(0, 0, (Slot("run", (1, _NUMEL), 0),))
    before, after = coding_seconds(fragment, compression, 0, num_clusters, costs)
    if makes_share:
        before = max(before, share_seconds(fragment, compression, num_clusters, costs))
    planned = before + after
    return seconds_per_element * _NUMEL / planned


def slowed(costs: Costs, compression: Compressor, slowdown: float) -> Costs:
    """Return `costs` with that codec, and the copies and sums beside it, so much slower."""
    formats = dict(costs.formats)
    is_coded = isinstance(compression, Quantized)
    for wire in {compression.wire, compression.mean_wire} if is_coded else ():
        if wire in formats:
            formats[wire] = formats[wire].slower(slowdown)
    copies = costs.copy_bytes_per_second / slowdown
    return replace(costs, formats=formats, copy_bytes_per_second=copies)
