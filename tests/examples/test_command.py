"""`dsx quickstart`: what it starts, and what it asks for where something is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dsx.data.command
import dsx.examples.command as quickstart
from dsx.cli import app


def test_it_starts_four_ranks_and_hands_further_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    started: list[Any] = []
    monkeypatch.setattr(dsx.data.command, "build", lambda *given: built.append(given))
    monkeypatch.setattr(quickstart, "find_spec", lambda name: object())
    monkeypatch.setattr(quickstart, "_count_gpus", lambda: 3)
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    done = CliRunner().invoke(app, ["quickstart", "--steps", "40", "--resume"])
    assert done.exit_code == 0, done.output
    assert built == [(["stdlib"], "data/stdlib")]
    ((_, command, environment),) = started
    assert command[1:5] == ["-m", "deepspeed.launcher.runner", "--num_gpus", "4"]
    assert command[-3:] == ["--steps", "40", "--resume"]
    assert Path(command[command.index("--deepspeed_config") + 1]).is_file()
    assert environment["DS_ACCELERATOR"] == "cpu" and environment["OMP_NUM_THREADS"] == "1"


def test_four_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "_count_gpus", lambda: 4)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert "DS_ACCELERATOR" not in quickstart.environment()


def test_a_missing_engine_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["quickstart"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("dsx quickstart: ")
    assert 'pip install "dsx-train[deepspeed,megatron]"' in done.stderr


def test_the_configuration_of_the_readme_is_the_one_it_takes() -> None:
    named = Path(__file__).parents[2] / "configs" / "quickstart.json"
    assert named.resolve() == Path(quickstart.__file__).with_name("quickstart.json")
