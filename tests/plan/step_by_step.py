"""The DAG node by node, as the model is stated: the oracle of dsx/plan/published/dag.py."""

from __future__ import annotations

from dsx.plan.published.scenario import Scenario


def utilization(scenario: Scenario, bits_per_second: float) -> float:
    """Walk through all nodes of all steps and send what is due, in FIFO order."""
    if "wfbp" in scenario.sync.method:
        return wfbp_utilization(scenario, bits_per_second)
    layers, node = scenario.compute.layers, scenario.compute.node_seconds
    is_whole = scenario.sync.granularity == "fragment"
    seconds = (scenario.bits_per_round / bits_per_second + scenario.codec_seconds) / layers
    num_steps, every = scenario.rounds * scenario.steps_per_round, scenario.launch_every
    waits: dict[tuple[int, int], float] = {}
    now = is_free = 0.0
    for step in range(num_steps):
        for layer in range(layers):
            now = max(now, waits.pop((step, layer), 0.0)) + node
        ready: dict[int, float] = {}
        for layer in reversed(range(layers)):
            now += node if layer == 0 else 2 * node
            ready[layer] = now
        if (step + 1) % every:
            continue
        launched = scenario.fragments[((step + 1) // every - 1) % len(scenario.fragments)]
        arrived: dict[int, float] = {}
        for layer in reversed(launched):
            is_free = max(is_free, now if is_whole else ready[layer]) + seconds
            arrived[layer] = is_free + scenario.wire.latency_seconds
        is_free = max(arrived.values())
        for layer in launched:
            waited_for = step + 1 + scenario.sync.overlap_steps, 0 if is_whole else layer
            waits[waited_for] = max(arrived[layer], waits.get(waited_for, 0.0))
    return num_steps * scenario.compute.step_seconds / max(now, is_free)


def wfbp_utilization(scenario: Scenario, bits_per_second: float) -> float:
    """Every step waits for all of its all-reduces; ASC's start-ups pass beside each other."""
    layers, node = scenario.compute.layers, scenario.compute.node_seconds
    sync, latency = scenario.sync, scenario.wire.latency_seconds
    seconds = (scenario.bits_per_round / bits_per_second + scenario.codec_seconds) / layers
    size = sync.layers_per_fragment if sync.method == "wfbp" else 1
    now = 0.0
    for _ in range(scenario.rounds):
        now += layers * node
        is_free, bucket = now, 0
        for layer in reversed(range(layers)):
            now += node if layer == 0 else 2 * node
            bucket += 1
            if bucket == size or layer == 0:
                if sync.method == "wfbp":
                    is_free = max(is_free, now) + latency + bucket * seconds
                else:
                    is_free = max(is_free, now + latency) + seconds
                bucket = 0
        now = max(now, is_free)
    return scenario.rounds * scenario.compute.step_seconds / now
