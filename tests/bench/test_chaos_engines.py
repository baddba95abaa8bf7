"""What trains in `dsx bench chaos`: each engine, what it reads, and faults that befall it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.bench.chaos.bench import Options
from dsx.bench.chaos.costs import costs_by_kind
from dsx.bench.chaos.left_out import samples_skipped
from dsx.bench.chaos.logs import Window
from dsx.bench.chaos.spoiling import Spoiler
from tests.bench.chaos_logs import sound, the
from tests.bench.test_chaos import run
from tests.installed import needs


def test_what_is_spoilt_is_spoilt_for_a_launch_alone() -> None:
    master, seen = torch.tensor([1.5, -2.0, 1e-9]), list[torch.Tensor]()
    before = master.clone()
    made = list[torch.Tensor]()
    loop = SimpleNamespace(
        launch_due=lambda is_skipped=False: seen.append(master.clone()),
        launches=SimpleNamespace(make_due=lambda: made.append(master.clone())),
    )
    spoiler = Spoiler(loop, lambda: [master])
    for factor in (None, 1e6, float("nan")):
        spoiler.factor = factor
        loop.launch_due()
        assert master.equal(before)
    assert seen[0].equal(before) and seen[1].equal(before * 1e6) and seen[2].isnan().all()
    assert made[0].equal(seen[1]) and made[1].isnan().all()  # what is sent is made at once, too


def test_an_engine_that_is_not_there_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> None:
        if "." in name:  # what it would be in is not there either
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ValueError, match=r"--engine deepspeed needs deepspeed, .*\[deepspeed\]"):
        Options(tmp_path / "out", engine="deepspeed")
    with pytest.raises(ValueError, match=r"needs megatron.core, which .*train\[megatron\]"):
        Options(tmp_path / "out", engine="megatron")


def test_what_an_engine_does_not_take_is_refused(tmp_path: Path) -> None:
    def refused(match: str, **choices: Any) -> None:
        with pytest.raises(ValueError, match=match):
            Options(tmp_path / "out", **choices)

    refused("--zero 2 is for --engine deepspeed, and this is torch", zero_stage=2)
    refused("--engine='jax' is not known", engine="jax")


@needs("deepspeed")
def test_a_stage_that_zero_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--zero 4 is no ZeRO stage"):
        Options(tmp_path / "out", engine="deepspeed", zero_stage=4)


@needs("megatron")
def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--ranks 3 is not served with --engine megatron"):
        Options(tmp_path / "out", engine="megatron", num_ranks=3)


def test_what_a_cluster_would_have_read_while_it_was_away_is_skipped() -> None:
    logs = sound("killed", is_back=True)  # away at steps 7 and 8
    assert samples_skipped(logs, 1) == 2 and samples_skipped(logs, 5) == 10
    assert samples_skipped(sound(), 1) == 0
    assert samples_skipped(sound("killed"), 1) == 6  # it is not back by the end, at step 12


def test_what_a_kind_of_fault_costs_is_the_longest_step_beside_it_of_somebody_else() -> None:
    logs = sound()
    for cluster, step, seconds in ((1, 3, 1.5), (0, 6, 2.5), (2, 6, 100.0)):
        the(logs[cluster, 0], "step", step=step)["seconds"] = seconds
    windows = [
        Window("reset", 0, 2.5, 3.5), Window("cut", 2, 5.5, 6.5), Window("cut", 2, 8.5, 9.5),
    ]  # fmt: skip
    assert costs_by_kind(logs, windows) == {
        "cut": {"faults": 2, "median_seconds": 1.0, "max_seconds": 2.0},
        "reset": {"faults": 1, "median_seconds": 1.0, "max_seconds": 1.0},
    }


def require_nothing_lost(found: dict[str, Any], num_events: int) -> None:
    assert found["problems"] == [] and sum(found["events"].values()) == num_events
    assert (found["mismatches"], found["rounds_lost"]) == (0, 0)
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)
    assert found["joins"] == found["events"]["kill_rank"] > 0
    assert found["rounds"] > 20 and found["rounds_refused"] > 0


KINDS = "kill_rank,reset,cut,clock,not_finite,too_large"
WORDS = ["--clusters", "3", "--events", "8", "--seed", "2", "--kinds", KINDS, "--no-undisturbed"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs("deepspeed")
def test_deepspeed(tmp_path: Path) -> None:
    found = run(tmp_path, "--engine", "deepspeed", *WORDS)
    require_nothing_lost(found, 8)
    assert found["engine"] == "deepspeed" and found["samples_are_dealt"]
    assert found["loss"] < 0.1


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs("megatron")
def test_megatron(tmp_path: Path) -> None:
    """What a lost cluster had left is read by nobody, and told as that."""
    found = run(tmp_path, "--engine", "megatron", *WORDS)
    require_nothing_lost(found, 8)
    assert found["engine"] == "megatron" and not found["samples_are_dealt"]
    assert found["samples_skipped"] > 0
    assert found["loss"] < 3.5  # ln 32, of which it knows nothing yet, is 3.47
