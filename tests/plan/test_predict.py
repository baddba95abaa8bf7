"""Predicted times: against closed forms, the DAG, and a line simulated in small steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.compress.base import Dense
from dsx.compress.low_rank import LowRank
from dsx.config.schema import preset
from dsx.core.types import Fragment, Slot
from dsx.method.control.adaptive_rank import AdaptiveRank
from dsx.method.method import Method
from dsx.plan.coding import coded_at_once, coding_seconds
from dsx.plan.link import PAYLOAD_SHARE, Costs, Link, read_codec_figures, wire_bytes
from dsx.plan.predict import at_interval, data_parallel, fitting_interval, predict
from dsx.plan.published.closed_forms import data_parallel_step_seconds
from dsx.plan.published.dag import elapsed_seconds
from dsx.plan.published.scenario import Compute, Scenario, Sync, Wire
from dsx.plan.timeline import Cost, Launch, SharedLink, Timeline
from dsx.plan.traffic import of_sizes

FREE = Costs(formats={}, copy_bytes_per_second=1e30)
BLOCKING = preset("diloco", schedule={"interval": 20})
LATE = preset("diloco_delayed", schedule={"interval": 20})
STREAMING = preset("streaming_diloco", schedule={"interval": 20})
ADAPTIVE = preset("cocodc", schedule={"interval": 20})
SIZES = [1_000_000] * 4
METHODS = {
    "blocking": BLOCKING,
    "late": LATE,
    "streaming": STREAMING,
    "adaptive": ADAPTIVE,
    "layerwise": preset("dreamddp", schedule={"interval": 4}),
}


def line_of(seconds: float, numel: int, num_clusters: int = 2) -> Link:
    """Return a line that carries a dense mean of so many elements in so many seconds."""
    sent = 4 * 2 * (num_clusters - 1) / num_clusters * numel
    return Link(8 * sent / seconds, payload_share=1)


def test_a_blocking_round_is_compute_and_transfer() -> None:
    found = predict(BLOCKING, of_sizes(SIZES), 1.0, line_of(5.0, sum(SIZES)), 2, FREE)
    assert found.round_seconds == pytest.approx(25.0, rel=1e-4)
    assert found.exposed_seconds == pytest.approx(5.0, rel=1e-3)
    assert found.utilization == pytest.approx(0.8, rel=1e-4)


@pytest.mark.parametrize("seconds", [5.0, 19.9, 30.0])
def test_one_round_late_hides_a_round_of_compute(seconds: float) -> None:
    found = predict(LATE, of_sizes(SIZES), 1.0, line_of(seconds, sum(SIZES)), 2, FREE)
    assert found.round_seconds == pytest.approx(max(20.0, seconds), rel=1e-4)


def test_latency_and_coding_take_their_time() -> None:
    sizes = [10**6]
    slow = Costs(FREE.formats, copy_bytes_per_second=4e6)
    base = predict(BLOCKING, of_sizes(sizes), 1.0, line_of(5.0, 10**6), 2, FREE)
    late = replace(line_of(5.0, 10**6), latency_seconds=0.5)
    found = predict(BLOCKING, of_sizes(sizes), 1.0, late, 2, FREE)
    # handshake, what two clusters exchange, commit: each asked for first
    assert found.round_seconds == pytest.approx(base.round_seconds + 3 * 2 * 0.5)
    # of more: slices to their owners, means back
    three = [
        predict(BLOCKING, of_sizes(sizes), 1.0, x, 3, FREE) for x in (line_of(5.0, 10**6), late)
    ]
    assert three[1].round_seconds == pytest.approx(three[0].round_seconds + 4 * 2 * 0.5)
    noted = replace(BLOCKING, control=AdaptiveRank(4, max_rank=4))  # whose measurements travel
    found = predict(noted, of_sizes(sizes), 1.0, late, 2, FREE)
    assert found.round_seconds == pytest.approx(base.round_seconds + 4 * 2 * 0.5, rel=1e-4)
    found = predict(BLOCKING, of_sizes(sizes), 1.0, line_of(5.0, 10**6), 2, slow)
    assert found.round_seconds == pytest.approx(base.round_seconds + 4 * 1.0)


def test_layers_hide_behind_the_backward_of_the_last_micro_batch_alone() -> None:
    """Eight of a second hide what one does; one of eight seconds all but the first layer."""
    line = line_of(1.5, sum(SIZES))
    accumulated = preset("dreamddp", schedule={"interval": 4, "backwards": 8})
    found = predict(accumulated, of_sizes(SIZES), 8.0, line, 2, FREE)
    short = predict(METHODS["layerwise"], of_sizes(SIZES), 1.0, line, 2, FREE)
    long = predict(METHODS["layerwise"], of_sizes(SIZES), 8.0, line, 2, FREE)
    assert found.exposed_seconds == pytest.approx(short.exposed_seconds, rel=1e-6)
    assert found.exposed_seconds > 0.7
    assert long.exposed_seconds == pytest.approx(1.5 / len(SIZES), rel=1e-3)
    assert found.round_seconds == pytest.approx(short.round_seconds + 4 * 7.0)


def scenario_of(method: Method, layers: int) -> Scenario:
    """Return the DAG's counterpart, with fragments that leave as a whole."""
    is_streaming, interval = method.schedule.takes_turns, method.schedule.interval
    overlap = interval if method.delay.rounds_under_way else method.delay.steps
    sync = Sync(
        "streaming" if is_streaming else "diloco",
        interval,
        overlap,
        granularity="fragment",
        layers_per_fragment=1 if is_streaming else 3,
    )
    return Scenario(Compute(sum(SIZES), layers, 1.0), sync, Wire(32, 2), rounds=200)


@pytest.mark.parametrize("method", [BLOCKING, LATE, STREAMING], ids=["now", "late", "streaming"])
@pytest.mark.parametrize("seconds", [1.0, 7.0, 18.0])
def test_as_the_dag_where_nothing_is_shared(method: Method, seconds: float) -> None:
    line = line_of(seconds, sum(SIZES))
    scenario = scenario_of(method, len(SIZES))
    by_dag = float(elapsed_seconds(scenario, np.array([line.bits_per_second]))[0]) / 200
    found = predict(method, of_sizes(SIZES), 1.0, line, 2, FREE)
    assert found.round_seconds == pytest.approx(by_dag, rel=0.01)


def test_a_large_fragment_that_shares_the_line_ends_later_than_before_it() -> None:
    """Launched at 0 and 2, waited for 2 steps later; the large one has 0.9 s left at 2.

    A FIFO would end it at 2.9 and lose 0.9 s; sharing with 0.5 s of the small one ends it at 3.4.
    """
    method, sizes = at_interval(STREAMING, 4), [500_000, 2_900_000]
    found = predict(method, of_sizes(sizes), 1.0, line_of(3.4, sum(sizes)), 2, FREE)
    assert found.exposed_seconds == pytest.approx(1.4, rel=1e-3)


def test_a_full_line_is_as_slow_however_it_is_shared() -> None:
    method = at_interval(STREAMING, 4)
    found = predict(method, of_sizes(SIZES), 1.0, line_of(7.2, sum(SIZES)), 2, FREE)
    assert found.round_seconds == pytest.approx(7.2, rel=1e-3)


def test_data_parallel_is_the_closed_form() -> None:
    line = Link(1e9, payload_share=1)
    found = data_parallel(SIZES, 2, 0.1, line)
    layer_seconds = 4 * SIZES[0] * 8 / 1e9
    compute = Compute(sum(SIZES), 4, 0.1)
    assert found.round_seconds == pytest.approx(data_parallel_step_seconds(compute, layer_seconds))


@pytest.mark.parametrize("name", [*METHODS, "data parallel"])
def test_a_better_line_never_harms_and_bits_are_conserved(name: str) -> None:
    latency = 0.0 if name == "layerwise" else 0.01  # which the search for its schedule leaves out
    links = [Link(10**exponent, latency) for exponent in (7, 7.5, 8, 8.5, 9, 9.5, 12)]
    if name in METHODS:
        found = [predict(METHODS[name], of_sizes(SIZES), 0.2, link, 3) for link in links]
    else:
        found = [data_parallel(SIZES, 3, 0.2, link) for link in links]
    if name != "adaptive":  # which sends more over a better line
        assert [f.round_seconds for f in found] == sorted(
            (f.round_seconds for f in found), reverse=True
        )
    for each in found:
        assert each.utilization <= 1
        assert each.round_seconds >= each.transfer_seconds * (1 - 1e-6)
        compute = each.steps_per_round * 0.2
        assert each.round_seconds == pytest.approx(compute + each.exposed_seconds)


def test_a_stages_transfers_share_the_line_and_take_turns() -> None:
    (whole,) = of_sizes(SIZES)
    stages = [[replace(f, id=0, stage=f.id)] for f in whole]
    line = line_of(2.0, sum(SIZES))
    one = predict(STREAMING, [whole], 1.0, line, 2, FREE)
    four = predict(STREAMING, stages, 1.0, line, 2, FREE)
    assert replace(four, coding_seconds=one.coding_seconds) == one
    assert four.coding_seconds == pytest.approx(one.coding_seconds / 4)  # a rank codes its own


def test_adaptive_sends_as_often_as_gamma_allows() -> None:
    line = line_of(4 * 1.25, sum(SIZES))  # gamma H Tc / Ts = 0.4 * 20 / 1.25
    found = predict(ADAPTIVE, of_sizes(SIZES), 1.0, line, 2, FREE)
    assert found.transmissions == 6
    assert found.bytes_per_round == pytest.approx(1.5 * 4 * sum(SIZES), rel=1e-4)


@pytest.mark.parametrize("method", [BLOCKING, LATE, STREAMING], ids=["now", "late", "streaming"])
def test_the_least_interval_fits_and_the_next_less_does_not(method: Method) -> None:
    line, ranks = line_of(33.0, sum(SIZES)), of_sizes(SIZES)
    target = 1.0 if method is LATE else 0.9
    least = fitting_interval(method, ranks, 1.0, line, 2, target)
    assert least is not None
    tried = [at_interval(method, h) for h in (least - 1, least)]
    reached = [predict(each, ranks, 1.0, line, 2).utilization for each in tried]
    assert reached[0] < target <= reached[1] + 1e-6
    if method is LATE:
        assert least == 34  # and some bytes of headers


def test_no_interval_hides_a_blocking_transfer() -> None:
    assert fitting_interval(BLOCKING, of_sizes(SIZES), 1.0, line_of(1, 10), 2) is None


@pytest.mark.parametrize("seconds", [19_200.0, 999_980.0])
def test_intervals_up_to_a_million_are_found(seconds: float) -> None:
    line = line_of(seconds, 10**9)
    least = fitting_interval(LATE, of_sizes([10**9]), 1.0, line, 2, 1 - 1e-9)
    assert least == pytest.approx(seconds, abs=10)
    slower = line_of(seconds + 10**6, 10**9)
    assert fitting_interval(LATE, of_sizes([10**9]), 1.0, slower, 2) is None


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_a_shared_line_against_small_steps(sent: list[tuple[float, float]], after: float) -> None:
    sent = sorted(sent)
    line = SharedLink(len(sent))
    numbers = [
        line.launch(at, fragment, Cost(0.1, seconds, after))
        for fragment, (at, seconds) in enumerate(sent)
    ]
    ends = [line.end(number) for number in numbers]
    left = [seconds for _, seconds in sent]
    expected, now, step = [0.0] * len(sent), 0.0, 0.002
    while any(s > 0 for s in left):
        active = [i for i, (at, _) in enumerate(sent) if at + 0.1 <= now and left[i] > 0]
        now += step
        for i in active:
            left[i] -= step / len(active)
            if left[i] <= 0:
                expected[i] = now + after
    assert ends == pytest.approx(expected, abs=0.05)


def test_transfers_of_one_fragment_come_one_after_another() -> None:
    line = SharedLink(1)
    numbers = [line.launch(at, 0, Cost(1.0, 2.0, 1.0)) for at in (0.0, 1.0, 20.0)]
    assert [line.end(number) for number in numbers] == [4.0, 8.0, 24.0]


@pytest.mark.parametrize(
    ("at_once", "ends"),
    [(1, [1.5, 2.5, 3.5]), (2, [2.0, 2.0, 2.5]), (3, [2.5] * 3), (None, [2.5] * 3)],
)
def test_transfers_wait_for_a_core_to_code_on(at_once: int | None, ends: list[float]) -> None:
    """Three at once: each codes for a second, then shares the line with those that have."""
    line = SharedLink(3, at_once)
    cost = Cost(1.0, 0.5, 0.0, coded_before=1.0)
    numbers = [line.launch(0.0, fragment, cost) for fragment in range(3)]
    assert [line.end(number) for number in numbers] == pytest.approx(ends)


def test_a_wait_for_messages_takes_no_core() -> None:
    line = SharedLink(2, 1)
    numbers = [line.launch(0.0, f, Cost(3.0, 0.5, 2.0, 0.0, 1.0, 1.0)) for f in range(2)]
    # the second codes from 1 to 2, and behind the line for a second when the first has
    assert [line.end(number) for number in numbers] == pytest.approx([5.5, 6.5])


@pytest.mark.parametrize(("cores", "seconds"), [(1, 4 * 40.0), (2, 2 * 40.0), (4, 40.0)])
def test_codes_of_a_round_take_what_the_budget_leaves_them(cores: int, seconds: float) -> None:
    """Four fragments, each 40 s of copies, sums and hashes on a core; the line takes nothing."""
    slow = Costs(FREE.formats, copy_bytes_per_second=4e5, cores=cores)
    free = line_of(1e-6, 4 * 10**6)
    found = predict(LATE, of_sizes([10**6] * 4), 1.0, free, 2, slow)
    assert found.round_seconds == pytest.approx(seconds, rel=1e-3)


def test_ranks_of_other_stages_code_on_cores_of_their_own() -> None:
    """A rank of each of four stages has one fragment, of 40 s."""
    slow = Costs(FREE.formats, copy_bytes_per_second=4e5, cores=1)
    ranks = [[replace(f, id=0, stage=f.id)] for f in of_sizes([10**6] * 4)[0]]
    found = predict(LATE, ranks, 1.0, line_of(1e-6, 4 * 10**6), 2, slow)
    assert found.round_seconds == pytest.approx(40.0, rel=1e-3)
    assert found.coding_seconds == pytest.approx(40.0, rel=1e-3)


def test_factors_are_made_on_all_cores_one_fragment_at_a_time() -> None:
    fragment, method = Fragment(0, 0, (Slot("w", (4096, 4096), 0),)), LowRank(rank=64)
    one = coding_seconds(fragment, method, 64, 2, Costs(cores=1))
    four = coding_seconds(fragment, method, 64, 2, Costs(cores=4))
    assert one == coding_seconds(fragment, method, 64, 2, Costs())
    saved = 3 * 2 * 4096**2 * 64 / Costs().flops * 3 / 4
    assert sum(one) - sum(four) == pytest.approx(saved)
    assert [coded_at_once(method, Costs(cores=n)) for n in (None, 1, 4)] == [None, 1, 1]
    assert [coded_at_once(Dense(), Costs(cores=n)) for n in (None, 1, 4)] == [None, 1, 4]


def test_what_a_line_counts_beside_the_payload() -> None:
    assert wire_bytes(1448) == pytest.approx(1514)
    assert Link(1e9).payload_bytes_per_second == pytest.approx(1.25e8 * PAYLOAD_SHARE)


def test_measured_codecs_replace_the_table() -> None:
    figure = {"format": "int4", "device": "cpu", "encode_gb_per_second": 2.0}
    figure |= {"decode_gb_per_second": 3.0, "encode_ef_gb_per_second": 1.0}
    costs = read_codec_figures([{**figure, "memcpy_gb_per_second": 9.0}])
    assert costs.formats["int4"].encode == 2e9
    assert costs.formats["int8"] == Costs().formats["int8"]
    assert costs.copy_bytes_per_second == 9e9
    method = preset("diloco", compression={"type": "quantized"})
    slow = predict(method, of_sizes(SIZES), 1.0, Link(1e12), 2, costs)
    fast = predict(method, of_sizes(SIZES), 1.0, Link(1e12), 2)
    assert slow.round_seconds > fast.round_seconds


def test_codes_made_at_the_launch_hold_the_step() -> None:
    """Copied, encoded, decoded and copied back, 2 MB/s each: 2 + 2 + 2 + 2 s of 1 M elements."""
    speeds = replace(Costs().formats["int4"], encode=2e6, decode=2e6)
    costs = Costs({"int4": speeds}, copy_bytes_per_second=2e6)

    def round_seconds(name: str, compression: dict[str, str]) -> float:
        method = preset(name, schedule={"interval": 40}, compression=compression)
        return predict(method, of_sizes([10**6]), 1.0, Link(1e12), 2, costs).round_seconds

    assert round_seconds("eager", {"type": "quantized"}) == pytest.approx(48.0, rel=1e-4)
    assert round_seconds("eager", {"type": "dense"}) == pytest.approx(40.0, rel=1e-4)
    assert round_seconds("diloco_delayed", {"type": "quantized"}) == pytest.approx(40.0, rel=1e-4)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="bits_per_second=0 must be"):
        Link(0)
    with pytest.raises(ValueError, match="step_seconds=0 must be"):
        predict(BLOCKING, of_sizes(SIZES), 0.0, Link(1e9), 2)


@pytest.mark.parametrize("seconds", [9.0, 10.3])
def test_two_rounds_late_a_backlog_is_felt_in_the_long_run(seconds: float) -> None:
    """3 % too slow a line takes 34 periods to use up the round that it may be late by."""
    late = Timeline(10, 1.0, [Launch(10, 0)], [Cost(0.1, seconds - 0.3, 0.2)], rounds_late=2)
    assert late.period_seconds() == pytest.approx(max(10.0, seconds), rel=1e-6)
    assert late.period_seconds(100, 50) == pytest.approx(max(10.0, seconds), rel=1e-6)
