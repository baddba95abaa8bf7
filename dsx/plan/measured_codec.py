"""A run's coding seconds as the speed of its codec: what `dsx plan --from-run` computes with."""

from __future__ import annotations

from dataclasses import replace

from dsx.plan.link import Costs
from dsx.plan.payload import Parts
from dsx.plan.settings import Coding
from dsx.plan.traffic import coding_seconds

_NUMEL = 10**6  # of the transfer that is compared


def slowdown_of(
    coding: Coding, num_clusters: int, seconds_per_element: float, costs: Costs
) -> float | None:
    """Return how many times as long a run's coding took as `costs` say.

    None for codecs whose seconds depend on more than elements: factors, and picked ones.
    """
    if coding.type not in ("dense", "quantized"):
        return None
    parts = Parts(0, _NUMEL, 1, (_NUMEL,), (), (), 0)
    return seconds_per_element * _NUMEL / sum(coding_seconds(parts, coding, num_clusters, costs))


def slowed(costs: Costs, coding: Coding, slowdown: float) -> Costs:
    """Return `costs` with that codec, and the copies and sums beside it, so much slower."""
    formats = dict(costs.formats)
    for wire in {coding.wire, coding.mean_wire} if coding.type == "quantized" else ():
        if wire in formats:
            speeds = formats[wire]
            formats[wire] = replace(
                speeds,
                encode=speeds.encode / slowdown,
                decode=speeds.decode / slowdown,
                encode_with_feedback=speeds.encode_with_feedback / slowdown,
            )
    copies = costs.copy_bytes_per_second / slowdown
    return replace(costs, formats=formats, copy_bytes_per_second=copies)
