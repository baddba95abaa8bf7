"""The DAG against its node by node version, closed forms, and what has to hold of any."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dsx.plan.published.closed_forms import data_parallel_step_seconds, least_bits_per_second
from dsx.plan.published.dag import elapsed_seconds, utilization
from dsx.plan.published.scenario import (
    OF_EVERY_STEP,
    Compute,
    Granularity,
    MethodName,
    Pattern,
    Scenario,
    Sync,
    Wire,
)
from dsx.plan.published.search import exactly
from tests.plan import step_by_step
from tests.plan.closed_forms import (
    diloco_round_seconds,
    overlapped_round_seconds,
    wfbp_step_seconds,
)

METHODS: list[MethodName] = ["data_parallel", "diloco", "streaming", "wfbp", "asc_wfbp"]
PATTERNS: list[Pattern] = ["strided", "sequential"]
GRANULARITIES: list[Granularity] = ["layer", "fragment"]
RATIOS = st.floats(0.02, 50)  # of a round's compute to the transfer of its bytes


@st.composite
def scenarios(draw: st.DrawFn, has_overhead: bool = True) -> Scenario:
    layers = draw(st.integers(1, 12))
    compute = Compute(draw(st.floats(1e6, 1e12)), layers, draw(st.floats(0.01, 10)))
    method = draw(st.sampled_from(METHODS))
    is_streaming = method == "streaming"
    interval = draw(st.integers(1, 12))
    sync = Sync(
        method,
        interval,
        0 if method in OF_EVERY_STEP else draw(st.integers(0, interval)),
        draw(st.integers(1, layers)),
        draw(st.sampled_from(PATTERNS)) if is_streaming else "strided",
        draw(st.none() | st.integers(1, 5)) if is_streaming else None,
        "layer" if "wfbp" in method else draw(st.sampled_from(GRANULARITIES)),
    )
    shares = draw(st.floats(0, 2)), draw(st.floats(0, 0.2))
    latency = shares[0] * compute.step_seconds if has_overhead else 0.0
    codec = shares[1] * compute.step_seconds / compute.params if has_overhead else 0.0
    wire = Wire(draw(st.floats(0.1, 64)), draw(st.integers(2, 64)), latency, codec)
    return Scenario(compute, sync, wire)


def at(scenario: Scenario, ratio: float) -> float:
    """Return the bandwidth at which a round's bytes take `1 / ratio` of its compute."""
    return least_bits_per_second(scenario, ratio)


def reached(scenario: Scenario, bits_per_second: float) -> float:
    return float(utilization(scenario, np.array([bits_per_second]))[0])


@given(scenarios(), RATIOS)
def test_equals_the_dag_node_by_node(scenario: Scenario, ratio: float) -> None:
    expected = step_by_step.utilization(scenario, at(scenario, ratio))
    assert reached(scenario, at(scenario, ratio)) == pytest.approx(expected, rel=1e-9)


@given(scenarios(), RATIOS)
def test_is_at_most_1_and_conserves_bits(scenario: Scenario, ratio: float) -> None:
    share = reached(scenario, at(scenario, ratio))
    assert 0 < share <= 1
    assert share <= ratio * (1 + 1e-9)


@given(scenarios(), RATIOS, RATIOS)
def test_grows_with_bandwidth(scenario: Scenario, one: float, other: float) -> None:
    slow, fast = sorted([one, other])
    assert reached(scenario, at(scenario, slow)) <= reached(scenario, at(scenario, fast)) + 1e-12


@given(scenarios(has_overhead=False), RATIOS, st.floats(0.01, 100), st.floats(0.1, 10))
def test_depends_on_bandwidth_per_bits_of_the_model(
    scenario: Scenario, ratio: float, size: float, width: float
) -> None:
    compute, wire = scenario.compute, scenario.wire
    params, bits = compute.params * size, wire.bits * width
    assume(bits <= 1024)
    other = dataclasses.replace(
        scenario,
        compute=dataclasses.replace(compute, params=params),
        wire=dataclasses.replace(wire, bits=bits),
    )
    expected = reached(scenario, at(scenario, ratio))
    moved = at(scenario, ratio) * (params * bits) / (compute.params * wire.bits)
    assert reached(other, moved) == pytest.approx(expected, rel=1e-9)


@given(scenarios(), RATIOS)
def test_every_step_without_overlap_is_data_parallel(scenario: Scenario, ratio: float) -> None:
    every_step = Sync("diloco", 1, 0, granularity=scenario.sync.granularity)
    diloco = dataclasses.replace(scenario, sync=every_step)
    parallel = dataclasses.replace(
        diloco, sync=dataclasses.replace(every_step, method="data_parallel", interval=100)
    )
    assert reached(diloco, at(diloco, ratio)) == reached(parallel, at(diloco, ratio))


@given(scenarios(), RATIOS, st.floats(0, 1), st.floats(0, 1))
def test_overheads_and_further_clusters_never_help(
    scenario: Scenario, ratio: float, latency: float, codec: float
) -> None:
    bandwidth, wire = at(scenario, ratio), scenario.wire
    for worse in (
        dataclasses.replace(wire, latency_seconds=wire.latency_seconds + latency),
        dataclasses.replace(wire, codec_seconds_per_byte=wire.codec_seconds_per_byte * (1 + codec)),
        dataclasses.replace(wire, clusters=wire.clusters + 1),
    ):
        other = dataclasses.replace(scenario, wire=worse)
        assert reached(other, bandwidth) <= reached(scenario, bandwidth) + 1e-12


@given(scenarios(), RATIOS)
def test_closed_forms(scenario: Scenario, ratio: float) -> None:
    compute, wire = scenario.compute, scenario.wire
    interval = scenario.sync.interval
    bandwidth = at(scenario, ratio)
    layer = (scenario.bits_per_round / bandwidth + scenario.codec_seconds) / compute.layers
    latency = wire.latency_seconds
    for sync, seconds in (
        (Sync("data_parallel"), data_parallel_step_seconds(compute, layer, latency)),
        (Sync("asc_wfbp"), data_parallel_step_seconds(compute, layer, latency)),
        *(
            (
                Sync("wfbp", layers_per_fragment=size),
                wfbp_step_seconds(compute, size, layer, latency),
            )
            for size in {1, (compute.layers + 1) // 2, compute.layers}
        ),
        (Sync("diloco", interval), diloco_round_seconds(compute, interval, layer, latency)),
    ):
        run = Scenario(compute, sync, wire)
        (elapsed,) = elapsed_seconds(run, np.array([bandwidth]))
        assert elapsed / run.rounds == pytest.approx(seconds, rel=1e-9)


@given(st.integers(33, 200), RATIOS)
@example(33, 1.64)
def test_the_usual_two_terms_do_for_models_of_33_layers_and_more(layers: int, ratio: float) -> None:
    compute = Compute(1e9, layers, 1.0)
    scenario = Scenario(compute, Sync("data_parallel"), Wire())
    layer = 1 / ratio / layers
    (elapsed,) = elapsed_seconds(scenario, np.array([at(scenario, ratio)]))
    terms = 1 + layer, (layers + 2) * compute.node_seconds + layers * layer
    assert elapsed / scenario.rounds == pytest.approx(max(terms), rel=0.01)


@settings(max_examples=40)
@given(st.integers(1, 30), RATIOS, st.floats(0, 3), st.integers(1, 12))
def test_a_round_that_hides_a_round_in_the_long_run(
    interval: int, ratio: float, latency: float, layers: int
) -> None:
    compute, sync = Compute(1e9, layers, 1.0), Sync("diloco", interval, interval)
    scenario = Scenario(compute, sync, Wire(latency_seconds=latency), rounds=500)
    (elapsed,) = elapsed_seconds(scenario, np.array([at(scenario, ratio)]))
    expected = overlapped_round_seconds(scenario, at(scenario, ratio))
    assert elapsed / scenario.rounds == pytest.approx(expected, rel=0.01)


@settings(max_examples=60)
@given(scenarios(), st.floats(5, 99))
def test_the_least_bandwidth_is_the_least(scenario: Scenario, percent: float) -> None:
    (found,) = exactly(scenario, [percent])
    if found.gbps is None:
        assert reached(scenario, np.inf) < percent / 100 * (1 + 1e-5)
        assert "out of reach" in found.note
        return
    bandwidth = found.gbps * 1e9
    assert bandwidth >= least_bits_per_second(scenario, percent / 100) * (1 - 1e-9)
    assert reached(scenario, bandwidth * (1 + 1e-9)) >= percent / 100 * (1 - 1e-12)
    assert reached(scenario, bandwidth * (1 - 1e-5)) < percent / 100


def test_a_layer_that_waits_for_its_turn_by_hand() -> None:
    # Two layers, u = 1: F1 F2 A2 W2 W1. W2 ends at 4, W1 at 5; transfers of 3 s end at 7 and 10.
    scenario = Scenario(Compute(2.0, 2, 5.0), Sync("data_parallel"), Wire(bits=3.0))
    (elapsed,) = elapsed_seconds(scenario, np.array([1.0]))
    assert elapsed == pytest.approx(20 * 10)


def test_buckets_by_hand() -> None:
    """Three layers, u = 1: F1 F2 F3 A3 W3 A2 W2 W1, backwards end at 5, 7 and 8."""
    compute, wire = Compute(3.0, 3, 8.0), Wire(bits=1.0, latency_seconds=2.0)

    def step(sync: Sync) -> float:
        return float(elapsed_seconds(Scenario(compute, sync, wire), np.array([1.0]))[0]) / 20

    assert step(Sync("wfbp", layers_per_fragment=1)) == 14  # 5 8, 8 11, 11 14
    assert step(Sync("wfbp", layers_per_fragment=2)) == 14  # 7 11, 11 14
    assert step(Sync("wfbp", layers_per_fragment=3)) == 13  # 8 13: nothing is hidden
    assert step(Sync("asc_wfbp")) == 11  # 7 8, 9 10, 10 11
    slow = Scenario(compute, Sync("wfbp", layers_per_fragment=2), wire)
    assert slow.fragments == [[1, 2], [0]] and slow.steps_per_round == 1


@given(scenarios(), RATIOS)
def test_start_ups_at_once_are_never_slower(scenario: Scenario, ratio: float) -> None:
    at_once = dataclasses.replace(scenario, sync=Sync("asc_wfbp"))
    bandwidth = at(at_once, ratio)
    for size in range(1, scenario.compute.layers + 1):
        one_by_one = dataclasses.replace(at_once, sync=Sync("wfbp", layers_per_fragment=size))
        assert reached(one_by_one, bandwidth) <= reached(at_once, bandwidth) + 1e-12
    whole = reached(dataclasses.replace(at_once, sync=Sync("data_parallel")), bandwidth)
    assert reached(at_once, bandwidth) == whole


def test_python_s_rounding_spaces_the_published_fragments() -> None:
    one = Scenario(Compute(1e9, 24, 0.1), Sync("streaming"), Wire())
    assert (len(one.fragments), one.launch_every, one.steps_per_round) == (8, 12, 96)
    assert one.fragments[1] == [1, 9, 17]
    in_runs = dataclasses.replace(one, sync=Sync("streaming", pattern="sequential"))
    assert in_runs.fragments[1] == [3, 4, 5]
