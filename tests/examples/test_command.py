"""`dsx quickstart`: what it starts, and what it asks for where something is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dsx
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


@pytest.mark.parametrize("arguments", [["-h"], ["--", "--help"]])
def test_help_for_the_script_is_the_scripts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def execve(*given: Any) -> None:
        started.append(given)
        raise SystemExit(0)

    monkeypatch.setattr(quickstart, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execve", execve)
    assert CliRunner().invoke(app, ["quickstart", *arguments]).exit_code == 0
    ((_, command, _),) = started
    assert command[-1] == "--help"


def test_a_missing_engine_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["quickstart"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("dsx quickstart: ")
    assert 'pip install "dsx-train[deepspeed]"' in done.stderr


def test_the_configuration_of_the_readme_is_the_one_it_takes() -> None:
    named = Path(__file__).parents[2] / "configs" / "quickstart.json"
    assert named.resolve() == Path(quickstart.__file__).with_name("quickstart.json")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--nosuch"], "--nosuch is not an option; "),
        (["--stesp", "40"], "--stesp is not an option, did you mean --steps?; "),
        (["--steps", "0"], "argument --steps: 0 must be a whole number from 1 to 1e+09; try 1; "),
        (["40"], "40 is not an option; "),
    ],
)
def test_what_the_script_would_refuse_is_refused_before_anything_is_made(
    given: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("something was made or started")

    monkeypatch.setattr(dsx.data.command, "build", never)
    monkeypatch.setattr(os, "execve", never)
    monkeypatch.setattr(quickstart, "find_spec", lambda name: object())
    done = CliRunner().invoke(app, ["quickstart", *given])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"dsx quickstart: {told}dsx quickstart -- --help lists")


def test_every_option_of_the_script_is_one_of_the_quickstart() -> None:
    pytest.importorskip("deepspeed")
    parser = dsx.add_config_arguments(quickstart.pretraining_arguments())
    for action in parser._actions:
        value = "1" if action.choices is None else next(iter(action.choices))
        for name in {*action.option_strings} - {"-h", "--help"}:
            quickstart._require_known([name] if action.nargs == 0 else [name, value])
    assert parser.get_default("deepspeed") is False and parser.get_default("dsx_store") is None
