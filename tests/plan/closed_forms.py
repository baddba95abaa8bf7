"""What the papers' own formulas give, and rounds in closed form: what the DAG is compared with.

CO2 (arXiv:2401.16265, Table 8), DiLoCoX (arXiv:2506.21263, Sec. 2.4.1 and Fig. 4).
"""

from __future__ import annotations

from dsx.plan.published.closed_forms import data_parallel_step_seconds, transfer_seconds
from dsx.plan.published.scenario import Compute, Scenario


def diloco_round_seconds(
    compute: Compute, interval: int, layer_seconds: float, latency: float = 0
) -> float:
    """Return a round of steps without a transfer and a last one as of data parallel."""
    last = data_parallel_step_seconds(compute, layer_seconds, latency)
    return (interval - 1) * compute.step_seconds + last


def wfbp_step_seconds(
    compute: Compute, layers_per_bucket: int, layer_seconds: float, latency: float
) -> float:
    """Return WFBP's step: from some bucket on the line is busy, and it waits for that one alone."""
    count, node = compute.layers, compute.node_seconds
    lasts = [
        max(0, first)
        for first in range(count - layers_per_bucket, -layers_per_bucket, -layers_per_bucket)
    ]
    ends = [
        (2 * (count - last) - (last == 0)) * node
        + (len(lasts) - i) * latency
        + (last + min(layers_per_bucket, (lasts[i - 1] if i else count) - last)) * layer_seconds
        for i, last in enumerate(lasts)
    ]
    return count * node + max(ends)


def overlapped_round_seconds(scenario: Scenario, bits_per_second: float) -> float:
    """Return a round in the long run where a transfer may take a whole round."""
    return max(scenario.compute_seconds, transfer_seconds(scenario, bits_per_second))


def overlap_ratio(overlap_steps: int, step_seconds: float, transfer_seconds: float) -> float:
    """Return the share of a transfer that `overlap_steps` steps hide (CO2, Table 8)."""
    return min(1.0, overlap_steps * step_seconds / transfer_seconds)


def tokens_per_second(
    tokens_per_step: float, scenario: Scenario, bits_per_second: float, is_overlapped: bool
) -> float:
    """Return DiLoCoX's throughput: `H B / max(H T, C / r + o)`, or with their sum."""
    compute, transfer = scenario.compute_seconds, transfer_seconds(scenario, bits_per_second)
    seconds = max(compute, transfer) if is_overlapped else compute + transfer
    return scenario.steps_per_round * tokens_per_step / seconds
