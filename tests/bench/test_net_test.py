"""`dsx net-test`, as it is called: figures over loopback, mistakes, missing clusters."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dsx.bench.net_test.advice import Model, plans
from dsx.bench.net_test.figures import AllReduce, Figures, RoundTrip
from dsx.bench.net_test.net_test import next_size
from dsx.cli import app
from dsx.comm.links.key_changes import add_key, make_key
from dsx.plan.launch_cost import launch_cost
from dsx.telemetry.measured_rates import Way, read_measured_rates
from tests.distributed import free_port

COMMAND = [sys.executable, "-c", "from dsx.cli import app; app()", "net-test"]


def start(cluster: int, port: int, *more: str) -> subprocess.Popen[str]:
    arguments = ["--clusters", "2", "--cluster-id", str(cluster), "--interface", "lo"]
    arguments += ["--rendezvous", f"tcp://127.0.0.1:{port}", "--deadline-seconds", "30", *more]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(COMMAND + arguments, text=True, **pipes)


@pytest.mark.ci
def test_two_clusters_over_loopback(tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "link.json"
    first = start(0, port, "--seconds", "0.01", "--streams", "1,3", "--json", str(path))
    second = start(1, port)
    shown, told = first.communicate(timeout=60)
    other, _ = second.communicate(timeout=60)
    assert first.returncode == second.returncode == 0, told
    assert other.strip() == "cluster 1: measured; cluster 0 shows what was found"
    found = json.loads(path.read_text())
    assert found["clusters"] == 2 and found["streams"] in (1, 3)
    (trip,) = found["round_trips"]
    assert trip["clusters"] == [0, 1] and trip["count"] >= 5
    assert 0 < trip["min_seconds"] <= trip["median_seconds"] < 0.5
    assert found["latency_seconds"] == trip["median_seconds"] / 2
    ends = [(e["from_cluster"], e["to_cluster"], e["streams"]) for e in found["pairs"]]
    assert ends == [(0, 1, 1), (1, 0, 1), (0, 1, 3), (1, 0, 3)]
    for pair in found["pairs"]:
        assert 1e6 < pair["one_way_bits_per_second"] < 1e12
        assert 1e6 < pair["both_ways_bits_per_second"] < 1e12
    rates = {e["streams"]: e["bits_per_second"] for e in found["all_reduce"]}
    assert set(rates) == {1, 3} and found["bits_per_second"] == rates[found["streams"]] > 1e6
    for each in found["all_reduce"]:
        assert each["bits_per_second"] == pytest.approx(8 * each["bytes_sent"] / each["seconds"])
    assert len(found["plans"]) == 3
    assert "0 and 1 at once, each" in shown and f"link.streams: {found['streams']}" in shown


@pytest.mark.ci
def test_two_clusters_measure_as_their_run_goes(tmp_path: Path) -> None:
    names, port = ["berlin", "oslo"], free_port()
    keys = [make_key(tmp_path / name, name)[0] for name in names]
    processes: list[subprocess.Popen[str]] = []
    for m, name in enumerate(names):
        for key in keys:
            add_key(tmp_path / name, key)
        link = {
            "security": "curve",
            "members": [f"berlin=127.0.0.1:{port}", "oslo"],
            "keys": str(tmp_path / name),
            "port": port,
            "streams": 2,
        }
        config = tmp_path / f"{name}.json"
        config.write_text(
            json.dumps({"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}, "link": link}})
        )
        arguments = ["--clusters", "2", "--cluster-id", str(m), "--config", str(config)]
        path = tmp_path / f"net_{m}.json"
        arguments += ["--seconds", "0.02", "--json", str(path), "--deadline-seconds", "30"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(COMMAND + arguments, text=True, **pipes))
    shown, other = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], shown + other
    assert "measured as a run with this goes: transport link, security curve" in shown
    found, other = (json.loads((tmp_path / f"net_{m}.json").read_text()) for m in (0, 1))
    assert found == other  # each cluster's run reads its own
    rates = read_measured_rates(tmp_path / "net_1.json", 1, Way(2, "link", "curve"), 2)
    assert rates.line == found["bits_per_second"] / 8 and rates.links.keys() == {0}
    assert (found["transport"], found["security"], found["streams"]) == ("link", "curve", 2)
    assert found["bits_per_second"] > 1e6 and found["latency_seconds"] < 0.5


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (0, "cluster 1 of 2 did not come within 0.4 s"),
        (1, "no rendezvous store answered at 127.0.0.1"),
    ],
)
def test_a_missing_cluster_is_named(cluster: int, said: str) -> None:
    arguments = ["net-test", "--clusters", "2", "--cluster-id", str(cluster), "--seconds", "0.1"]
    arguments += ["--rendezvous", f"tcp://127.0.0.1:{free_port()}", "--deadline-seconds", "0.4"]
    started = time.monotonic()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_cluster_that_is_lost_is_named() -> None:
    port = free_port()
    first = start(0, port, "--seconds", "5")
    second = start(1, port)
    assert second.stderr is not None and second.stderr.readline() == "2 clusters have met\n"
    second.kill()
    second.communicate(timeout=60)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "cluster 1 closed its connection" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--clusters 1", "clusters=1 must be 2 to 10000; try 2"),
        ("--cluster-id 2", "cluster-id=2 must be 0 to 1; try 1"),
        ("--rendezvous env://", "must be 'env://' (one launcher over all clusters) or 'tcp://host"),
        ("--streams 1,65", "streams='1,65' must be numbers from 1 to 64"),
        ("--streams two", "streams='two' must be numbers from 1 to 64"),
        ("--seconds 100", "deadline-seconds=300 must be at least 4 times seconds=100; try 400"),
        ("--interface nope0", "interface='nope0' must be one of this host's: "),
        ("--target 100", "target=100 must be 0.1 to 99.99; try 99.99"),
        ("--params 0", "params=0 must be 1 to"),
        ("--json no/such/file", "there is no such directory"),
    ],
)
def test_mistakes_are_answered_before_anyone_is_waited_for(wrong: str, said: str) -> None:
    right = ["--clusters", "2", "--cluster-id", "0", "--rendezvous", "tcp://127.0.0.1:29400"]
    result = CliRunner().invoke(app, ["net-test", *right, *wrong.split()])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def figures(*rates: tuple[int, float]) -> Figures:
    all_reduce = [AllReduce(n, 10**6, 8e6 / rate, rate) for n, rate in rates]
    return Figures(2, 1.0, [RoundTrip((0, 1), 0.1, 0.09, 5)], [], all_reduce)


def test_more_streams_must_be_worth_it() -> None:
    assert figures((1, 100.0), (2, 104.0), (4, 90.0)).best.streams == 1
    assert figures((1, 100.0), (2, 150.0), (4, 156.0), (8, 120.0)).best.streams == 2
    assert figures((1, 100.0), (2, 150.0), (4, 160.0)).best.streams == 4


@given(st.integers(1, 10**9), st.floats(1e-4, 100), st.floats(0.01, 100))
def test_sizes_grow_until_a_measurement_is_long_enough(
    size: int, elapsed: float, seconds: float
) -> None:
    larger = next_size(size, elapsed, seconds)
    if elapsed >= seconds or size >= 2**29:
        assert larger is None
    if larger is not None:
        assert size < 8 * size + 1 and larger <= 8 * size and larger % 4 == 0
        assert larger >= min(2 * size - 3, 2**29)


def test_the_least_interval_is_that_of_the_planner() -> None:
    model, rate, latency = Model(1e9, 24, 1.0, 95.0), 1e8, 0.05
    for clusters in (2, 4):
        blocking, delayed, coded = plans(model, clusters, rate, latency)
        assert blocking.interval and delayed.interval and coded.interval
        sent = 8 * 4e9 * 2 * (clusters - 1) / clusters
        coding = 4 * 4e9 / 6.9e9  # passes over memory
        seconds = (
            sent / rate + 4 * 2 * latency + coding
        )  # four exchange rounds of two one-way latencies
        launched = 1e9 * launch_cost().seconds_per_element  # of the training thread, once a round
        assert delayed.interval == pytest.approx(0.95 * seconds, abs=1)
        assert blocking.interval == pytest.approx(19 * (seconds + launched), abs=20)
        for plan in (blocking, delayed, coded):
            assert plan.utilization is not None and 0.95 <= plan.utilization < 0.98
        assert delayed.interval / 8 < coded.interval < delayed.interval / 4


def test_on_a_fast_line_launches_take_what_the_planner_says() -> None:
    """Where nothing else does: 1.05 s of a round of 1e9 elements, of which no more than 5 %."""
    launched = 1e9 * launch_cost().seconds_per_element
    for plan in plans(Model(1e9, 24, 1.0, 95.0), 2, 1e15, 0.0)[:2]:
        assert plan.interval is not None and plan.interval >= 19 * launched
    late = plans(Model(1e9, 24, 1.0, 95.0), 2, 1e15, 0.0)[1]
    assert late.interval == pytest.approx(19 * launched, abs=1)


def test_what_no_interval_can_give_is_said() -> None:
    assert [plan.interval for plan in plans(Model(1e15, 1, 1e-3, 95.0), 2, 1e3, 0.0)] == [None] * 3
