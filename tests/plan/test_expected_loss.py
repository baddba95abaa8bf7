"""The loss that a plan expects is that of the nearest row, and says what is beyond all rows."""

from __future__ import annotations

from typing import Any

from dsx.bench.convergence.leaderboard import summarize
from dsx.method.choices import PRESETS
from dsx.plan.expected_loss import expected_loss, explain, leaderboard
from tests.bench.test_leaderboard import LENGTHS, STUDY, run


def row(**changes: Any) -> dict[str, Any]:
    usual = {
        "preset": "eager", "gap_percent": 2.0, "gap_sd": 0.5, "seeds": [0, 1], "steps": 1600,
        "interval": 16, "clusters": 4, "parameters": 100_000, "inner": "muon", "shards": "iid",
    }  # fmt: skip
    return usual | changes


def test_most_rounds_come_first_then_the_nearest_h_and_clusters() -> None:
    rows = [
        row(steps=160, gap_percent=9.0, interval=32, clusters=8),
        row(gap_percent=3.0, clusters=2),
        row(gap_percent=1.5, clusters=8),
        row(gap_percent=4.0, clusters=8, steps=6400, interval=64),
        row(gap_percent=0.1, clusters=8, shards="skewed"),
    ]
    found = expected_loss("eager", 32, 8, 50_000, rows)
    assert found is not None and found.gap_percent == 1.5
    assert found.beyond == ("parameters",)
    assert str(found) == "1.5+-0.5*"
    near = expected_loss("eager", 50, 7, 100_000, rows)
    assert near is not None and (near.gap_percent, near.beyond) == (4.0, ())
    far = expected_loss("eager", 128, 16, 10**11, rows)
    assert far is not None and far.beyond == ("parameters", "H", "clusters")
    assert expected_loss("diloco", 32, 8, 50_000, rows) is None


def test_what_is_said_names_the_runs_and_what_is_beyond() -> None:
    found = expected_loss("eager", 8, 4, 100_000, [row(gap_sd=None, seeds=[0])])
    assert found is not None and str(found) == "2.0*"
    said = explain([found, found])
    assert said[1] == "  100 rounds of 16 steps, 4 clusters, 1e+05 parameters, inner muon: eager"
    assert "extrapolated from there in H" in said[-1] and len(said) == 3
    inside = expected_loss("eager", 16, 4, 100_000, [row()])
    assert inside is not None and len(explain([inside])) == 2
    assert explain([]) == []


def test_the_rows_that_come_with_dsx_are_as_the_leaderboard_writes_them() -> None:
    lengths = {0: LENGTHS}
    (written,) = summarize([run("eager", 0, 1.3, 1.25, bytes_per_cluster=1)], STUDY, {}, lengths)
    for known in leaderboard():
        assert known["preset"] in PRESETS and known.keys() <= written.keys()
        found = expected_loss(known["preset"], known["interval"], 4, known["parameters"])
        assert found is not None and found.beyond == ()
