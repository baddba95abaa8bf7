"""What can be said without a DAG: a step of data parallel, and what a round asks of the link."""

from __future__ import annotations

from dsx.plan.published.scenario import Compute, Scenario


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


def transfer_seconds(scenario: Scenario, bits_per_second: float) -> float:
    """Return how long the line is held in a round."""
    sent = scenario.bits_per_round / bits_per_second
    return sent + scenario.codec_seconds + scenario.latency_seconds


def least_bits_per_second(scenario: Scenario, target: float) -> float:
    """Return the bandwidth below which `target` cannot be sustained: conservation of bits."""
    return target * scenario.bits_per_round / scenario.compute_seconds
