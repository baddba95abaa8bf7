"""`dsx bench engines`: what it refuses, how it judges a row, and two rows of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsx.bench.engines.bench import Row, judge
from dsx.bench.engines.combinations import COMBINATIONS, parse
from dsx.bench.engines.job import CLUSTERS, Job, Seen, Way
from dsx.bench.engines.show import as_markdown
from dsx.cli import app
from dsx.config.schema import load_config
from tests.bench.corpus import build_corpus
from tests.installed import needs

SEEN = Seen([5.0, 4.0], 3.0, "w", "a")


def run_cli(*arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it has said."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "500", "TERM": "dumb"})
    return done.exit_code, done.output


def judged(**others: Seen) -> Row:
    """A row of runs that are as they should be, but that their last rank has seen something else.

    `others` are by way; each cluster has two ranks, the first of which has no loss.
    """
    first = replace(SEEN, losses=[], validation=None)
    seen: dict[Way, list[list[Seen]]] = {
        way: [[first, SEEN] for _ in range(count)] for way, count in CLUSTERS.items()
    }
    for way, other in others.items():
        seen[way][-1][-1] = other  # type: ignore[index]
    row = Row("tp", "megatron", "tensor 2", 2)
    judge(row, seen)
    return row


def test_what_is_right_is_a_row_without_a_word() -> None:
    row = judged()
    assert not row.wrong and row.is_same and row.are_equal
    assert row.plain == row.one == 3.0 and row.averages == {"recommended": 3.0, "diloco": 3.0}
    text = as_markdown([row], 200)
    assert "| megatron | tensor 2 | 2 | 3.0000 | 3.0000 | yes | 3.0000 | 3.0000 | yes | 0 |" in text
    assert text.endswith("1 of 1 as they should be.\n")


@pytest.mark.parametrize(
    ("way", "other", "said"),
    [
        ("one", replace(SEEN, losses=[5.0, 4.0000001]), "rank 1, step 2: loss 4.0 and 4.0000001"),
        ("one", replace(SEEN, weights="v"), "rank 1: weights w and v, equal losses"),
        ("diloco", replace(SEEN, average="b"), "diloco: averages of the clusters differ"),
        ("diloco", replace(SEEN, validation=3.1), "diloco: no one loss"),
    ],
)
def test_what_is_not_is_told(way: str, other: Seen, said: str) -> None:
    row = judged(**{way: other})
    assert any(said in why for why in row.wrong), row.wrong
    assert f"tp: {row.wrong[0]}" in as_markdown([row], 200)


def test_a_loss_that_does_not_fall_and_an_average_that_is_far_are_told() -> None:
    seen: dict[Way, list[list[Seen]]] = {
        "plain": [[SEEN]], "one": [[SEEN]],
        "recommended": [[replace(SEEN, validation=4.6)]] * 2,
        "diloco": [[replace(SEEN, validation=float("nan"))]] * 2,
    }  # fmt: skip
    row = Row("torch", "torch", "one rank", 1)
    judge(row, seen)
    assert "recommended: loss 5.000 to 4.600, not below 0.9 of it" in row.wrong
    assert "recommended: 4.6000, more than 1.2 times 3.0000" in row.wrong
    assert "diloco: no one loss" in row.wrong
    assert "| 4.6000 | - | yes |" in as_markdown([row], 200)


@pytest.mark.parametrize("way", ["one", "recommended", "diloco"])
@pytest.mark.parametrize("steps", [40, 200])
def test_every_way_is_a_configuration(way: Way, steps: int) -> None:
    given = Job("tp", way, steps, "data", "tcp://127.0.0.1:1", 60.0).dsx(0)
    assert given is not None
    config = load_config(given)
    assert config.clusters.num_clusters == CLUSTERS[way]
    assert config.method.schedule.interval <= steps // 5  # type: ignore[attr-defined]


def test_names_are_looked_up_before_anything_is_started(tmp_path: Path) -> None:
    assert [one.name for one in parse("tp, ddp,tp")] == ["tp", "ddp"]
    assert len(parse(None)) == len(COMBINATIONS)
    status, told = run_cli("bench", "engines", "--only", "jax")
    assert status == 2 and "--only has 'jax'; it takes torch, ddp, fsdp2, zero0-fp32" in told
    status, told = run_cli("bench", "engines", "--data", str(tmp_path))
    assert status == 2 and f"build one: dsx data build --from stdlib --out {tmp_path}" in told


@pytest.mark.parametrize(
    "name", [pytest.param("tp", marks=pytest.mark.ci), pytest.param("ddp", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(600)
@needs("megatron")
def test_a_row_is_as_it_should_be(name: str, tmp_path: Path) -> None:
    data, file = build_corpus(tmp_path), tmp_path / "rows.json"
    status, told = run_cli(
        "bench", "engines", "--quick", "--only", name, "--data", str(data), "--json", str(file)
    )  # fmt: skip
    assert not status, told
    assert "1 of 1 as they should be." in told and f"1/1  {name}: " in told
    (row,) = json.loads(file.read_text())
    assert row["name"] == name
    assert row["is_same"] and row["are_equal"] and row["plain"] == row["one"]


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_rank_that_fails_is_a_row_that_says_why(tmp_path: Path) -> None:
    data = build_corpus(tmp_path)
    (data / "train.bin").unlink()
    status, told = run_cli("bench", "engines", "--only", "torch", "--data", str(data))
    assert status == 1
    assert "plain: rank 0 of cluster 0 has ended with 1" in told and "train" in told
    assert "0 of 1 as they should be." in told
