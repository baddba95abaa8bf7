"""What can be said without a DAG: step and round times, hours, and the papers' own formulas.

The DAG agrees with the first two exactly, with the third within 1 % over some hundred rounds.
The others serve to compare papers: CO2 (arXiv:2401.16265, Table 8), DiLoCoX (arXiv:2506.21263,
Sec. 2.4.1 and Fig. 4), CoCoDC (arXiv:2504.17672, eq. 9).
"""

from __future__ import annotations

import math

from dsx.plan.scenario import Compute, Scenario


def data_parallel_step_seconds(compute: Compute, layer_seconds: float, latency: float = 0) -> float:
    """Return a step that ends with the transfer of the first layer.

    The line has been busy since the last layer's backward, since the second's, or not before it;
    between those two layers, backwards are 2 u apart and cannot decide alone. Without the term of
    the second layer, which is left out elsewhere, the step is up to u too short (1 % at 32 layers).
    """
    layers, node = compute.layers, compute.node_seconds
    idle = compute.step_seconds + layer_seconds
    if layers == 1:  # no activation backward before the only transfer
        return idle + latency
    from_second = compute.step_seconds - node + 2 * layer_seconds
    busy = (layers + 2) * node + layers * layer_seconds
    return max(idle, from_second, busy) + latency


def diloco_round_seconds(
    compute: Compute, interval: int, layer_seconds: float, latency: float = 0
) -> float:
    """Return a round of steps without a transfer and a last one as of data parallel."""
    last = data_parallel_step_seconds(compute, layer_seconds, latency)
    return (interval - 1) * compute.step_seconds + last


def overlapped_round_seconds(scenario: Scenario, bits_per_second: float) -> float:
    """Return a round in the long run where a transfer may take a whole round."""
    return max(scenario.compute_seconds, transfer_seconds(scenario, bits_per_second))


def transfer_seconds(scenario: Scenario, bits_per_second: float) -> float:
    """Return how long the line is held in a round."""
    sent = scenario.bits_per_round / bits_per_second
    return sent + scenario.codec_seconds + scenario.latency_seconds


def least_bits_per_second(scenario: Scenario, target: float) -> float:
    """Return the bandwidth below which `target` cannot be sustained: conservation of bits."""
    return target * scenario.bits_per_round / scenario.compute_seconds


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


def num_transmissions(
    interval: int, num_fragments: int, gamma: float, step_seconds: float, fragment_seconds: float
) -> int:
    """Return N, how many fragments CoCoDC sends in H steps (eq. 9)."""
    fitting = math.floor(gamma * interval * step_seconds / fragment_seconds)
    return max(num_fragments, fitting)
