"""Where a run's "dsx" block is found, what flags and variables change, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsx.config.files import ConfigError
from dsx.run.arguments import split, with_cluster_id
from dsx.run.block import RunBlock
from dsx.run.session import RouteNotTaken, Session

BLOCK = {"preset": "diloco", "clusters": {"num_clusters": 2}, "schedule": {"interval": 10}}


def write(path: Path, document: Any) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def test_the_block_is_found_wherever_a_launch_shows_it(tmp_path: Path) -> None:
    file = write(tmp_path / "ds.json", {"bf16": {"enabled": True}, "dsx": BLOCK})
    other = write(tmp_path / "data.json", {"rows": [1]})
    for block in (
        RunBlock([f"--dsx-config={file}"], {}, []),
        RunBlock([], {"DSX_CONFIG": file}, []),
        RunBlock([], {}, ["--lr", "3", "--deepspeed", file, other]),
        RunBlock([], {}, [f"--deepspeed={file}", f"--deepspeed_config={file}"]),
        RunBlock([], {}, ["--deepspeed", json.dumps({"dsx": BLOCK})]),
        RunBlock([], {"ACCELERATE_DEEPSPEED_CONFIG_FILE": file}, []),
        RunBlock(
            ["--dsx-preset=diloco", "--dsx-num-clusters=2"], {"DSX_SCHEDULE_INTERVAL": "10"}, []
        ),
    ):
        assert block.is_known
        assert block.resolve() == {"dsx": BLOCK}
    later = RunBlock(["--dsx-cluster-id=1"], {}, ["train.txt", "missing.json"])
    assert not later.is_known
    assert not later.show({"bf16": {}}, "a config")
    assert later.show({"dsx": BLOCK}, "a config")
    assert later.resolve()["dsx"]["clusters"] == {"num_clusters": 2, "cluster_id": 1}


def test_a_flag_comes_before_a_variable_and_that_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "ds.json", {"dsx": BLOCK})
    environ = {"DSX_SCHEDULE_INTERVAL": "20", "DSX_CLUSTER_ID": "0", "DSX_RENDEZVOUS": "host:1"}
    block = RunBlock(["--dsx-schedule-interval=30"], environ, [file]).resolve()["dsx"]
    assert block["schedule"] == {"interval": 30}
    clusters = {"num_clusters": 2, "cluster_id": 0, "rendezvous": "tcp://host:1"}
    assert block["clusters"] == clusters


@pytest.mark.parametrize(
    ("flags", "environ", "document", "said"),
    [
        (["--dsx-cluster-idd=1"], {}, {}, "did you mean --dsx-cluster-id"),
        ([], {"DSX_CLUSTERS": "2"}, {}, "did you mean DSX_NUM_CLUSTERS?"),
        ([], {"DSX_ZZZ": "2"}, {}, "DSX_ZZZ in the environment is not a variable of dsx"),
        (["--dsx-config=nowhere.json"], {}, {}, "no config file at nowhere.json"),
        ([], {}, {"dsx": 3}, '"dsx" must be an object, not 3'),
        ([], {"DSX_CONFIG": "other"}, {"dsx": BLOCK}, 'there are two "dsx" blocks, of '),
        ([], {"DSX_CONFIG": "none"}, {}, 'the file has no "dsx" block'),
    ],
)
def test_what_cannot_be_meant_is_refused(
    flags: list[str], environ: dict[str, str], document: Any, said: str, tmp_path: Path
) -> None:
    write(tmp_path / "other", {"dsx": {**BLOCK, "preset": "eager"}})
    write(tmp_path / "none", {})
    environ = {n: str(tmp_path / v) if n == "DSX_CONFIG" else v for n, v in environ.items()}
    with pytest.raises(ConfigError) as caught:
        RunBlock(flags, environ, [write(tmp_path / "ds.json", document)])
    assert said in str(caught.value)


def test_json_with_a_block_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"dsx": {"preset": "diloco",}}')
    with pytest.raises(ConfigError, match="a comma before"):
        RunBlock([], {}, [str(tmp_path / "ds.json")])


def test_flags_of_dsx_are_taken_from_wherever_they_stand() -> None:
    line = split(
        ["--local_rank=3", "--dsx-cluster-id", "1", "train.py", "--lr", "1", "--dsx-preset=eager"]
    )
    assert (line.script, line.is_module) == ("train.py", False)
    assert line.arguments == ("--local_rank=3", "--lr", "1")
    assert line.flags == ("--dsx-cluster-id=1", "--dsx-preset=eager")
    line = split(["-m", "package.train", "-m", "x"])
    assert (line.script, line.is_module, line.arguments) == ("package.train", True, ("-m", "x"))
    for given, said in (
        (["--dsx-preset", "eager"], "no script to run, nothing behind"),
        (["--lr", "3"], "no script to run, --lr where its name should be"),
        (["train.py", "--dsx-preset"], "--dsx-preset has no value"),
    ):
        with pytest.raises(ConfigError, match=said):
            split(given)


def test_a_cluster_is_put_into_arguments_once_it_is_known() -> None:
    assert with_cluster_id(["--out", "runs/{cluster_id}"], 1) == ["--out", "runs/1"]
    with pytest.raises(ConfigError, match=r"runs/\{cluster_id\}: which cluster this is"):
        with_cluster_id(["runs/{cluster_id}"], None)


def test_a_route_that_was_not_taken_is_named(tmp_path: Path) -> None:
    unknown = Session(RunBlock([], {}, []))
    with pytest.raises(RouteNotTaken, match='No "dsx" block was found: give --dsx-config'):
        unknown.require_engine("the script has ended")
    known = Session(RunBlock([], {}, [write(tmp_path / "ds.json", {"dsx": BLOCK})]))
    known.seen.append("a DeepSpeed engine without optimizer")
    with pytest.raises(RouteNotTaken) as caught:
        known.require_engine("the script trains with SGD.step()")
    for part in (
        "SGD.step(), and no engine is attached",
        "(seen: a DeepSpeed engine without optimizer)",
        "deepspeed.initialize with an optimizer",
        "dsx.attach(model, optimizer, config=...)",
    ):
        assert part in str(caught.value)
