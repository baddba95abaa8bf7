"""Two launchers that meet over links with keys: the same bits, a cut line, a killed cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dsx.comm.links.key_changes import add_key, make_key
from tests.comm.links.clusters import Line
from tests.distributed import free_port
from tests.installed import needs
from tests.launch.test_healing import NAMES as THREE
from tests.launch.test_healing import configs_of
from tests.launch.test_launch import launch, results, write_config

pytestmark = [needs("deepspeed"), pytest.mark.ci]
__all__ = ["launch"]
NAMES = ("berlin", "oslo")


def with_keys(folder: Path, line: Line, port: int) -> list[Path]:
    """Write each site's configuration, with keys of its own; oslo calls berlin over the line."""
    made = {name: make_key(folder / name, name)[-1] for name in NAMES}
    paths: list[Path] = []
    for name in NAMES:
        for other in NAMES:
            if other != name:
                add_key(folder / name, made[other])
        path = write_config(folder / f"{name}.json")
        config: dict[str, Any] = json.loads(path.read_text())
        config["dsx"]["link"] = {
            "security": "curve",
            "members": [f"berlin={line.address}", "oslo"],
            "keys": str(folder / name),
            "port": port,
        }
        path.write_text(json.dumps(config))
        paths.append(path)
    return paths


def gateways_at(port: int) -> list[int]:
    """The processes that hold a host's port for its ranks."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"dsx.comm.links.gateway" in words and str(port).encode() in words:
                found.append(int(folder.name))
    return found


def test_two_launchers_over_a_line_that_is_cut_and_a_cluster_that_is_killed(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--steps", 30, "--out"]
    plain = write_config(tmp_path / "gloo.json", rendezvous=f"tcp://127.0.0.1:{free_port()}")
    own = ["--deepspeed_config", plain, *steps, tmp_path / "gloo", "--dsx-cluster-id"]
    for cluster in [launch(f"gloo{m}", 2, *own, m) for m in range(2)]:
        assert cluster.wait() == 0, cluster.output()

    port = free_port()
    line = Line(port)
    configs = with_keys(tmp_path, line, port)

    def start(way: str, *args: Any) -> list[Any]:
        return [
            launch(f"{way}{m}", 2, "--deepspeed_config", configs[m], *args, "--dsx-cluster-id", m)
            for m in range(2)
        ]

    clusters = start("links", *steps, tmp_path / "links", "--step-seconds", 0.1)
    for step in (5, 12, 20):
        clusters[0].wait_for(f"step {step}\n")
        line.cut()
    clusters[0].wait_for("step 25\n")
    (gateway,) = gateways_at(port)  # of two ranks: the one port that is open
    os.kill(gateway, signal.SIGKILL)
    for cluster in clusters:
        assert cluster.wait() == 0, cluster.output()
    assert results(tmp_path / "links") == results(tmp_path / "gloo")
    assert f"it listens at port {port} again" in clusters[0].output()
    assert not gateways_at(port)
    assert b"incarnation" not in line.passed and b"adamw" not in line.passed.lower()
    assert len(line.passed) > 10_000

    saves = ["--step-seconds", 0.1, "--save-dir", tmp_path / "saved", "--steps"]
    for path in configs:
        config = json.loads(path.read_text())
        config["dsx"]["clusters"]["quorum_wait_seconds"] = 0  # it does not wait: the other ends
        path.write_text(json.dumps(config))
    clusters = start("killed", *saves, 1000)
    for cluster in clusters:
        cluster.wait_for("saved 5\n")
        cluster.wait_for("step 8\n")
    clusters[1].end()  # its launcher and its ranks, by SIGKILL
    killed = time.monotonic()
    clusters[0].wait_for("; to go on, start", 30, may_end=True)
    seconds = time.monotonic() - killed
    assert clusters[0].wait(30) == 1
    assert (
        "cluster 1 is lost, and the run cannot go on without it; saved in" in clusters[0].output()
    )
    assert seconds < 5
    assert not gateways_at(port)
    clusters = start("resumed", *saves, 20, "--resume", "--out", tmp_path / "resumed")
    for cluster in clusters:
        assert cluster.wait() == 0, cluster.output()
    (first,), (second,) = (
        {(one["started_at"], one["checksum"]) for one in told}
        for told in map(json.loads, ((tmp_path / f"resumed.{m}").read_text() for m in range(2)))
    )
    assert first == second and first[0] >= 8  # the one that was killed takes what is saved
    line.close()
    with capsys.disabled():
        print(f"\nto the bit, with 3 cuts and a killed gateway; saved {seconds:.1f} s after a kill")


@pytest.mark.parametrize(
    "preset", ["streaming_diloco", pytest.param("recommended", marks=pytest.mark.slow)]
)
def test_of_three_sites_two_go_on_without_the_one_that_is_killed(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    """Two ranks each; the first one is killed, which has led the log, and by which all had met.

    What the two save, all three go on from: the first one takes the state of the second, and reads
    on behind what it had committed.
    """

    def change(config: dict[str, Any]) -> None:
        if preset == "recommended":  # codes are made at a launch, and two of each under way
            kept = {"clusters": config["dsx"]["clusters"], "schedule": {"interval": 4}}
            config["dsx"] = {"preset": preset, "delay": {"steps": 3}, **kept}

    configs = configs_of(tmp_path, change)

    def start(way: str, *args: Any) -> list[Any]:
        saved = ["--save-dir", tmp_path / "saved", "--out", tmp_path / way,
                 "--reads", tmp_path / f"{way}_read"]  # fmt: skip
        return [
            launch(f"{way}_{name}", 2, "--deepspeed_config", configs[m], *saved, *args,
                   "--step-seconds", 0.1, "--dsx-cluster-id", m)
            for m, name in enumerate(THREE)
        ]  # fmt: skip

    clusters = start("first", "--steps", 30)
    for cluster in clusters:
        cluster.wait_for("step 11\n", 120)
    clusters[0].end()
    for cluster in clusters[1:]:
        assert cluster.wait() == 0, cluster.output()
        assert "cluster 0 is lost: going on with clusters 1, 2" in cluster.output()
    told = [json.loads((tmp_path / f"first.{m}").read_text()) for m in (1, 2)]
    assert told[0] == told[1] and [one["cluster"] for one in told[0]] == [1, 2]
    assert told[0][0]["checksum"] == told[0][1]["checksum"]
    with capsys.disabled():
        print(f"\n{[x for x in clusters[1].output().splitlines() if 'going on' in x]}")

    clusters = start("second", "--steps", 36, "--resume")
    for cluster in clusters:
        assert cluster.wait() == 0, cluster.output()
    (told,) = {(tmp_path / f"second.{m}").read_text() for m in range(3)}
    assert [one["started_at"] for one in json.loads(told)] == [30, 30, 30]
    assert len({one["checksum"] for one in json.loads(told)}) == 1
    killed = samples_read(tmp_path, "first", 0)
    others = Counter(samples_read(tmp_path, "first", 1) + samples_read(tmp_path, "first", 2))
    for m in range(3):
        others.update(samples_read(tmp_path, "second", m))
    assert {*others.values()} == {1}
    committed = [sample for sample in killed if sample not in others]
    assert committed == killed[: len(committed)] and committed  # it may have been all


def samples_read(folder: Path, way: str, cluster: int, num_ranks: int = 2) -> list[int]:
    """Return what a cluster has read, in the order that its ranks share."""
    ranks = [
        [json.loads(line)["samples"] for line in file.read_text().splitlines()]
        for rank in range(num_ranks)
        if (file := folder / f"{way}_read.{cluster}.{rank}").exists()
    ]
    steps = zip(*ranks, strict=False)  # one rank may have been killed a step before another
    return [one for batches in steps for samples in zip(*batches, strict=True) for one in samples]
