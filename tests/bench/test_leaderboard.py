"""What a leaderboard says of runs, beside sums made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dsx.bench.convergence.leaderboard import bytes_ratio, summarize, tokens_ratio
from dsx.bench.convergence.task import BASELINE, Study

STUDY = Study("data", 4, 1000, 10, 2, 8, 2, 16, 2, 1e-3, 2, 8, "cpu", inner="muon", rest_rate=2.0)
LENGTHS = [(250, 2.0), (500, 1.5), (1000, 1.25)]


def run(preset: str, seed: int, loss: float, base: float, **further: Any) -> dict[str, Any]:
    return {
        "preset": preset, "seed": seed, "val_loss": loss, "gap_percent": 100 * (loss / base - 1),
        "lr": None, "momentum": None, "parameters": 100, "hidden_percent": 0.0,
        "bytes_per_cluster": 0, "average_bytes": 0, "own": {}, "tail_loss": 1.01 * loss, **further,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        (1.25, 1.0),
        (1.5, 0.5),
        (2.0, 0.25),
        (1.75, 0.25 * math.sqrt(2)),
        (1.375, 0.5 * math.sqrt(2)),
        (1.125, math.sqrt(2)),  # the last line goes on
        (0.1, 2.0),  # but not further
        (2.01, None),
        (math.nan, None),
    ],
)
def test_tokens_to_a_loss_lie_between_whole_runs(loss: float, share: float | None) -> None:
    assert tokens_ratio(loss, LENGTHS) == (None if share is None else pytest.approx(share))


def test_data_parallel_that_does_not_gain_has_no_tokens_to_a_loss() -> None:
    assert tokens_ratio(1.0, [(250, 2.0), (500, 1.4), (1000, 1.5)]) is None


def test_bytes_are_those_of_codes_and_of_the_average() -> None:
    ring = 1000 * 2 * 3 * 100 * 2 / 4  # steps, 2 (C - 1) / C parts, bf16
    sent = run("diloco", 0, 1.0, 1.0, bytes_per_cluster=2000, average_bytes=500)
    assert bytes_ratio(STUDY, sent) == pytest.approx(ring / 2500)
    assert bytes_ratio(STUDY, run(BASELINE, 0, 1.0, 1.0, bytes_per_cluster=1)) == 1
    assert bytes_ratio(STUDY, run("eager", 0, 1.0, 1.0)) == math.inf


def test_a_row_is_the_mean_over_its_seeds_and_a_run_that_diverged_is_last() -> None:
    runs = [
        run("eager", 0, 1.5, 1.25, bytes_per_cluster=1),
        run("eager", 1, math.nan, 1.25, bytes_per_cluster=1),
        run("diloco", 0, 1.375, 1.25, bytes_per_cluster=3000),
        run("diloco", 1, 1.5, 1.2, bytes_per_cluster=3000),
        run(BASELINE, 0, 1.25, 1.25),
        run(BASELINE, 1, 1.2, 1.2),
    ]
    lengths = {0: LENGTHS, 1: [(250, 2.0), (500, 1.5), (1000, 1.2)]}
    table = summarize(runs, STUDY, {BASELINE: 6, "diloco": 4}, lengths)
    assert [row["preset"] for row in table] == [BASELINE, "diloco", "eager"]
    diloco = table[1]
    assert diloco["gap_percent"] == pytest.approx(17.5)
    assert diloco["gap_sd"] == pytest.approx(7.5 * math.sqrt(2))
    assert diloco["tokens_ratio"] == pytest.approx((0.5 * math.sqrt(2) + 0.5) / 2)
    assert diloco["bytes_ratio"] == pytest.approx(100)
    assert diloco["tail_percent"] == pytest.approx(1.0)
    assert (diloco["seeds"], diloco["tries"], diloco["tokens"]) == ([0, 1], 4, 64_000)
    assert table[0]["gap_percent"] == 0 and table[0]["tokens_ratio"] == 1
    assert table[2]["tokens_ratio"] is None and table[2]["gap_sd"] is None
