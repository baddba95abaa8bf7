"""Flags say what a "dsx" block says, and what is wrong with them is named."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsx.config.flags import add_flags, all_flags, show_resolved
from dsx.config.schema import ConfigError, load_config
from dsx.method.choices import PRESETS
from tests.flags import read_flags

from .fuzz import FIX

TWO = ["--dsx-num-clusters", "2"]


def block_of(arguments: list[str]) -> Any:
    config = read_flags(arguments)
    sections = config.clusters, config.metrics, config.state, config.link
    return *sections, config.method, config.axes


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_the_same_from_flags_and_from_json(name: str) -> None:
    config = load_config({"dsx": {"preset": name, "clusters": {"num_clusters": 2}}})
    assert read_flags(["--dsx-preset", name, *TWO]) == config


def test_every_kind_of_value_is_read_as_in_json() -> None:
    block = {
        "preset": "dilocox",
        "clusters": {"num_clusters": 3, "cluster_id": 1, "rendezvous": "tcp://a.example:29400",
                     "deadline_seconds": 90.5},
        "metrics": {"dir": "runs/x", "tensorboard": True, "trace": True, "trace_steps": [5, 9],
                    "prometheus": "127.0.0.1:9464"},
        "state": {"device": "host"},
        "link": {"streams": 4},
        "schedule": {"interval": 50},
        "outer_optimizer": {"type": "adam", "lr": 0.1, "betas": [0.9, 0.99]},
        "compression": {"rank": 8, "exclude": ["embedding", "head"]},
        "control": {"type": "fixed"},
    }  # fmt: skip
    flags = """--dsx-preset dilocox --dsx-num-clusters=3 --dsx-cluster-id 1
        --dsx-rendezvous a.example:29400 --dsx-deadline-seconds 90.5 --dsx-metrics-dir runs/x
        --dsx-metrics-tensorboard true --dsx-metrics-trace true --dsx-metrics-trace-steps 5,9
        --dsx-metrics-prometheus 127.0.0.1:9464
        --dsx-state-device host --dsx-link-streams 4
        --dsx-schedule-interval 50 --dsx-outer-optimizer-type adam --dsx-outer-optimizer-lr 0.1
        --dsx-outer-optimizer-betas 0.9,0.99 --dsx-compression-rank 8
        --dsx-compression-exclude embedding,head --dsx-control-type fixed --num-layers 4"""
    assert read_flags(flags.split()) == load_config({"dsx": block})


def test_a_file_gives_what_flags_override(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "schedule": {"interval": 30}}
    path.write_text(json.dumps({"dsx": block}))
    read = read_flags(["--dsx-config", str(path), "--dsx-outer-optimizer-lr", "0.5"])
    assert read.axes["schedule"]["interval"] == 30
    assert read.axes["outer_optimizer"]["lr"] == 0.5
    assert read_flags(["--dsx-config", str(path), "--dsx-preset", "eager"]).preset == "eager"
    path.write_text("{}")
    with pytest.raises(ConfigError, match='no "dsx" block'):
        read_flags(["--dsx-config", str(path)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dsx-preset", "diloco"], "--dsx-num-clusters is missing"),
        (TWO, "--dsx-preset is missing"),
        (["--dsx-preset", "dilocx", *TWO], "did you mean 'dilocox'"),
        (["--dsx-preset", "diloco", *TWO, "--dsx-schedule-intervall", "5"],
         "did you mean --dsx-schedule-interval"),
        (["--dsx-preset", "diloco", *TWO, "--dsx-schedule-interval", "often"],
         "dsx.schedule.interval='often'"),
        (["--dsx-preset", "diloco", *TWO, "--dsx-delay-alpha", "0.5"],
         "dsx.delay.alpha is not a known key for type='blocking'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(arguments)
    assert said in str(caught.value)


def test_flags_are_in_the_help_and_tell_what_is_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--num-layers", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert all(flag.name in shown for flag in all_flags())
    flags = ["--dsx-preset", "dilocox", *TWO, "--num-layers", "4"]
    namespace, config = parser.parse_args(flags), read_flags(flags)
    show_resolved(namespace, config)
    assert namespace.dsx_schedule_interval == config.method.schedule.interval
    assert namespace.dsx_compression_type == "low_rank"
    assert namespace.dsx_delay_alpha is None  # of a type that is not in force
    assert namespace.num_layers == 4


VALUES = [
    "", " ", "0", "-1", "1e30", "nan", "Infinity", "9" * 5000, "x", "true", "null", "[", "[1", "{}",
    '"x', "1,x", "20261122", "[" * 100_000,
]  # fmt: skip


BY_DEFAULT = (
    "--dsx-metrics-dir", "--dsx-metrics-trace-steps", "--dsx-compression-exclude",
    "--dsx-state-dir",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(f.name, marks=[] if f.name in BY_DEFAULT else pytest.mark.ci)
        for f in all_flags()
        if f.key not in ("config", "preset")
    ],
)
def test_every_flag_takes_a_value_or_refuses_it(name: str) -> None:
    """In one message with a fix, and a value that it says to write is taken."""
    for value in VALUES:
        given = ["--dsx-preset", "dilocox", *TWO, f"{name}={value}"]
        message = refusal(given)
        if message is None:
            continue
        assert "\n" not in message and len(message) < 900 and FIX.search(message), message
        advised = re.search(r"; (?:write|try) (\S+)$", message)
        if advised and "must be" in message:
            then = refusal([*given[:-1], f"{name}={advised[1]}"])
            assert then is None or then.split("=")[0] != message.split("=")[0], (message, then)


def refusal(arguments: list[str]) -> str | None:
    try:
        read_flags(arguments)
    except ConfigError as error:
        return str(error)
    return None


def test_what_looks_like_a_number_is_a_folder_where_one_is_meant() -> None:
    config = read_flags(["--dsx-preset", "diloco", *TWO, "--dsx-metrics-dir", "20261122"])
    assert config.metrics.dir == "20261122"


def test_a_number_of_one_choice_may_be_a_list_of_another() -> None:
    given = ["--dsx-preset", "cocodc", *TWO, "--dsx-schedule-step-seconds", "1"]
    config = read_flags([*given, "--dsx-schedule-transfer-seconds", "0.5"])
    assert config.axes["schedule"]["transfer_seconds"] == 0.5


@pytest.mark.parametrize("name", ["--dsx-preset", "--dsx-num-clusters", "--dsx-metrics-dir"])
def test_a_flag_without_its_value_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"argument {name}: expected one argument; give each"):
        read_flags(["--dsx-preset", "diloco", *TWO, name])


def test_a_folder_is_no_file_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is a folder; give a file"):
        read_flags(["--dsx-config", str(tmp_path)])
