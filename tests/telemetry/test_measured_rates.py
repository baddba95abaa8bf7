"""What `dsx net-test` has measured, as a run reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dsx
from dsx.bench.net_test.figures import AllReduce, Figures, PairBandwidth
from dsx.bench.net_test.figures import RoundTrip as Trip
from dsx.config.schema import load_config
from dsx.telemetry.measured_rates import MeasuredRates, Way, read_measured_rates, say_rate

WAY = Way(3, "link", "curve")


def write_measured(path: Path, clusters: int = 3, transport: str = "link", **more: Any) -> Path:
    """Write what net-test does: 100 Mbit/s from cluster 0 to 1, 10 more to 2, and so on."""
    pairs = [
        PairBandwidth(a, b, streams, 9e9, streams * (1e8 + 3e7 * a + 1e7 * (b - 1)))
        for a in range(clusters) for b in range(clusters) if a != b for streams in (1, 4)
    ]  # fmt: skip
    sums = [AllReduce(streams, 10, 1.0, streams * 9.4e7) for streams in (1, 4)]
    trips = [Trip((0, 1), 0.02, 0.01, 9)]
    security = "curve" if transport == "link" else "none"
    found = Figures(clusters, 1.0, trips, pairs, sums, transport, security).as_json()
    path.write_text(json.dumps({**found, "plans": [], **more}))
    return path


def test_a_clusters_own_rates_are_of_the_runs_streams(tmp_path: Path) -> None:
    path = write_measured(tmp_path / "net.json")
    assert read_measured_rates(path, 0, WAY, 1) == MeasuredRates(11.75e6, {1: 12.5e6, 2: 13.75e6})
    assert read_measured_rates(path, 2, WAY, 4) == MeasuredRates(47e6, {0: 75e6, 1: 80e6})


@pytest.mark.parametrize(
    ("more", "streams", "said"),
    [
        ({"clusters": 2}, 1, r"was measured with clusters 2, and this run has 3: measure as it"),
        ({"transport": "gloo"}, 1, r"was measured with transport gloo, and this run has link"),
        ({"security": "none"}, 1, r"was measured with security none, and this run has curve"),
        ({}, 2, r"was measured over 1, 4 streams, .* link.streams=2: measure again with --streams"),
        ({"all_reduce": []}, 1, r"was measured over  ?streams"),
        (
            {"all_reduce": [{"streams": 1, "bits_per_second": 0}]},
            1,
            r"is no file .*a rate of 0 bits per s",
        ),
        ({"pairs": None}, 1, r"is no file of dsx net-test \(TypeError: "),
        ({"pairs": [{}]}, 1, r"is no file of dsx net-test \(KeyError: 'from_cluster'\); write it"),
    ],
)
def test_what_is_of_another_line_is_refused(
    tmp_path: Path, more: dict[str, Any], streams: int, said: str
) -> None:
    path = write_measured(tmp_path / "net.json", **more)
    with pytest.raises(ValueError, match=r"^dsx.metrics.net_test='.*net.json' " + said):
        read_measured_rates(path, 0, WAY, streams)


@pytest.mark.parametrize("text", ["", "[]", "7", '{"clusters": 3}', "[" * 100_000, "\x00"])
def test_what_is_no_file_of_it_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "net.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no file of dsx net-test"):
        read_measured_rates(path, 0, WAY, 1)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read: No such file or directory; write it by"):
        read_measured_rates(path, 0, WAY, 1)


def test_a_rate_is_said_beside_the_other() -> None:
    assert say_rate(4.75e6, 11.75e6) == "38 of 94 Mbit/s measured"
    assert say_rate(4.75e6, None) == "38 Mbit/s"
    assert say_rate(153e6, 1.25e9) == "1,224 of 10,000 Mbit/s measured"


def test_it_needs_a_place_to_be_shown() -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    with pytest.raises(dsx.ConfigError, match="net_test='net.json' needs dsx.metrics.dir or prom"):
        load_config({"dsx": {**block, "metrics": {"net_test": "net.json"}}})
    for place in ({"dir": "run"}, {"prometheus": "127.0.0.1:9464"}):
        load_config({"dsx": {**block, "metrics": {"net_test": "net.json", **place}}})
