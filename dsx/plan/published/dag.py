"""Utilization from the step DAG: forwards and backwards per layer, and one link in FIFO order.

Source: the simulation of Streaming DiLoCo (arXiv:2501.18512) and Eager Updates (arXiv:2502.12996,
Sec. 3.1). Nodes of equal cost u in the order F_1..F_L, then A_l, W_l for l = L..1 (no A_1); the
transfer of layer l is ready when W_l has ended; F_l of step t + 1 + tau waits for what was
launched at t. Utilization is `steps * T / elapsed`, drained.

Compute is a chain that only forwards make wait, so a step is known by `f`, when its forwards have
ended: W_l follows at a fixed distance, and F_l started late ends the forwards at a fixed distance.
With FIFO order a launch depends on f and on when the link is free only by sums and maxima, so it
is `free' = max(free + a, f + b)` and, where it is waited for, `f >= max(free + c, f_launch + d)`,
with four constants per fragment: a step's cost does not depend on the number of layers. A node by
node version is the test oracle. Everything is vectorised over bandwidths.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsx.plan.published.scenario import Scenario
from dsx.plan.published.wfbp import bucketed_step_seconds

Array = NDArray[np.float64]


def utilization(scenario: Scenario, bits_per_second: Array) -> Array:
    """Return the share of the time in which compute runs, per bandwidth; at most 1."""
    compute = scenario.rounds * scenario.compute_seconds
    return np.minimum(compute / elapsed_seconds(scenario, bits_per_second), 1.0)


def elapsed_seconds(scenario: Scenario, bits_per_second: Array) -> Array:
    """Return when the last step and the last transfer have ended, per bandwidth; inf is allowed."""
    if scenario.sync.method == "wfbp":
        return scenario.rounds * bucketed_step_seconds(scenario, bits_per_second)
    step_seconds, every = scenario.compute.step_seconds, scenario.launch_every
    node = scenario.compute.node_seconds
    delay = 1 + scenario.sync.overlap_steps
    launches = _launches(scenario, bits_per_second)
    waits: deque[tuple[int, Array]] = deque()
    step, is_free = -1, np.zeros_like(bits_per_second)
    forwards_end = is_free + scenario.compute.layers * node - step_seconds
    for number in range(scenario.rounds * len(launches)):
        due = (number + 1) * every - 1
        while waits and waits[0][0] <= due:
            waiting, end = waits.popleft()
            forwards_end = np.maximum(forwards_end + (waiting - step) * step_seconds, end)
            step = waiting
        forwards_end = forwards_end + (due - step) * step_seconds
        step = due
        launch = launches[number % len(launches)]
        end = np.maximum(is_free + launch.if_queued, forwards_end + launch.if_at_once)
        is_free = np.maximum(is_free + launch.held_if_queued, forwards_end + launch.held_if_at_once)
        waits.append((step + delay, end))
    compute_end = forwards_end + (step_seconds - scenario.compute.layers * node)
    return np.maximum(compute_end, is_free)


class _Launch(NamedTuple):
    """A fragment's four constants, per bandwidth.

    From when the link is free, or from the end of the launching step's forwards, to the earliest
    end of the forwards that wait for all its layers, and to when the link is free again.
    """

    if_queued: Array
    if_at_once: Array
    held_if_queued: Array
    held_if_at_once: Array


def _launches(scenario: Scenario, bits_per_second: Array) -> list[_Launch]:
    numel_share = 1 / scenario.compute.layers
    layer_seconds = numel_share * (
        scenario.bits_per_round / bits_per_second + scenario.codec_seconds
    )
    return [_launch(scenario, layers, layer_seconds) for layers in scenario.fragments]


def _launch(scenario: Scenario, layers: list[int], layer_seconds: Array) -> _Launch:
    count, node = scenario.compute.layers, scenario.compute.node_seconds
    latency = scenario.wire.latency_seconds
    layer = np.array(layers[::-1], dtype=np.float64)[:, None]  # in the order of the backward
    ready = np.where(layer == 0, 2 * count - 1, 2 * (count - layer)) * node
    rest = (count - layer) * node  # from the start of F_l to the end of the forwards
    sent = np.arange(1, len(layers) + 1)[:, None] * layer_seconds
    if scenario.sync.granularity == "fragment":
        ready, rest = np.full_like(ready, (2 * count - 1) * node), np.full_like(rest, count * node)
        sent = np.broadcast_to(sent[-1], sent.shape)
        arrived = ready + latency + sent
    else:
        # a layer's turn comes when it is ready, or after any earlier one that was sent at once
        arrived = np.maximum.accumulate(ready - (sent - layer_seconds), axis=0) + sent + latency
    return _Launch(
        (sent + latency + rest).max(axis=0),
        (arrived + rest).max(axis=0),
        sent[-1] + latency,
        arrived[-1],
    )
