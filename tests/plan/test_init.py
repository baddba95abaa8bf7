"""`dsx init`: what it writes is the planner's choice, valid, explained, and never over another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.config.schema import load_config
from dsx.plan.init.answers import Answers, Missing, complete
from dsx.plan.model_files import read_words

TOLD = {
    "--clusters": 2, "--params": 7e9, "--layers": 32, "--hidden": 4096, "--gpus-per-cluster": 8,
    "--step-seconds": 2, "--gbps": 1, "--latency-ms": 20,
}  # fmt: skip


def init(file: Path, *more: Any) -> Result:
    words = [str(word) for pair in TOLD.items() for word in pair]
    return CliRunner().invoke(app, ["init", str(file), *words, *map(str, more)])


def planned() -> dict[str, Any]:
    words = [str(word) for pair in TOLD.items() for word in pair]
    done = CliRunner().invoke(app, ["plan", *words, "--json"])
    block: dict[str, Any] = json.loads(done.stdout)["candidates"][0]["dsx"]
    return block


def test_a_json_is_the_planners_choice_with_every_key_explained(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    done = init(file, "--zero", 2, "--lr", 1e-3)
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text())
    assert document["zero_optimization"] == {"stage": 2} and document["bf16"] == {"enabled": True}
    assert document["optimizer"]["params"]["lr"] == 1e-3
    block = document["dsx"]
    assert block.pop("metrics") == {"dir": "runs/ds"}
    assert block["clusters"].pop("rendezvous") == "env://"
    assert block == planned()
    page = file.with_suffix(".md").read_text()
    for section, value in block.items():
        for key in value if isinstance(value, dict) else [""]:
            name = f"dsx.{section}.{key}".rstrip(".")
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` ")]
            assert len(row.split(" | ")[2]) > 20, row
    seen = CliRunner().invoke(app, ["doctor", str(file)])
    assert seen.exit_code == 0, seen.output


def test_flags_have_comments_and_say_the_same(tmp_path: Path) -> None:
    from dsx.config.flags import block_of_flags

    file = tmp_path / "run.flags"
    done = init(file, "--rendezvous", "tcp://meet:29400")
    assert done.exit_code == 0, done.output
    config = load_config(block_of_flags(read_words(file)))
    assert (config.clusters.rendezvous, config.clusters.store) == ("tcp://meet:29400", "standalone")
    wanted = planned()
    wanted["clusters"] |= {"rendezvous": "tcp://meet:29400", "store": "standalone"}
    assert config.method == load_config({"dsx": wanted}).method
    assert "# The number of clusters (C) that train together" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["run.flags"]


def test_nothing_is_written_over_another(tmp_path: Path) -> None:
    for name in ("ds.json", "ds.md"):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_text("mine")
        done = init(tmp_path / "ds.json")
        assert (
            done.exit_code == 2 and f"{name} exists: give another name, or --force" in done.stderr
        )
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert init(tmp_path / "ds.json", "--force").exit_code == 0
    assert "preset" in (tmp_path / "ds.json").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ds.json", "--clusters", "2"], "missing: --params; --layers; --gpus-per-cluster; --step"),
        (["ds.yaml"], "ends in .json, for DeepSpeed, or in .flags, for Megatron"),
        (["no/ds.json"], "there is no such directory"),
    ],
)
def test_mistakes_end_with_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", *words])
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_line_that_carries_nothing_is_said(tmp_path: Path) -> None:
    done = init(tmp_path / "ds.json", "--gbps", 1e-6)
    assert done.exit_code == 0 and "No method reaches 95 % on this line" in done.stdout


def test_what_is_not_told_is_asked_for() -> None:
    asked: list[str] = []
    answers = {
        "params": ["much", "7e9"], "layers": ["32"], "gpus_per_cluster": ["8"], "gpu": ["h100"],
        "tokens_per_step": ["4e6"], "gbps": ["1"],
    }  # fmt: skip

    def ask(gap: Missing) -> str:
        asked.append(gap.name)
        return answers[gap.name].pop(0) if gap.name in answers else ""

    found = complete(Answers(clusters=3), ask)
    assert asked == [
        "rendezvous", "params", "params", "layers", "hidden", "gpus_per_cluster", "step_seconds",
        "gpu", "tokens_per_step", "gbps", "latency_ms",
    ]  # fmt: skip
    assert (found.clusters, found.params, found.hidden, found.rendezvous) == (
        3,
        7e9,
        None,
        "env://",
    )
    assert found.step_seconds is None and found.read().question.num_clusters == 3
