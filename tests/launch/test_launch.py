"""The ways to launch, through the real `deepspeed` and `torchrun`, and how launches fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.tags import complete_tags
from dsx.telemetry.report import summarize
from dsx.telemetry.run_folder import read_about
from tests.distributed import free_port
from tests.forked_commands import start_command
from tests.installed import needs
from tests.tiny import CASES

pytestmark = needs("deepspeed")

SCRIPT = Path(__file__).with_name("train_tiny.py")
BIN = Path(sys.executable).parent


def write_config(path: Path, **clusters: Any) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "dsx": {
            "preset": "streaming_diloco",
            "clusters": {
                "num_clusters": 2,
                "join_deadline_seconds": 60,
                "deadline_seconds": 20,
                **clusters,
            },
            **CASES["streaming_diloco"].overrides,
        },
    }
    path.write_text(json.dumps(config))
    return path


class Launcher:
    """One launcher's command in a process group of its own, its output in a file."""

    def __init__(
        self,
        directory: Path,
        name: str,
        how: int | list[Any],
        *args: Any,
        script: Path = SCRIPT,
        is_executed: bool = False,
    ) -> None:
        """Start it; in Python it is forked (see forked_commands.py) unless it is to be executed."""
        self.log = directory / f"{name}.log"
        own = ["--num_gpus", how, "--master_port", free_port()]
        command = how if isinstance(how, list) else ["deepspeed", *own]
        command = [BIN / command[0], *command[1:]]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(directory / "extensions"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        words = [str(part) for part in [*command, script, *args]]
        self.log.write_bytes(b"")
        self.process = start_command(words, self.log, environment, is_executed)

    def wait(self, timeout_seconds: float = 90) -> int:
        """Return the exit status; if there is none in time, show where each rank stands."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGUSR1)  # see train_tiny.py
            time.sleep(1)
            raise AssertionError(
                f"still running after {timeout_seconds} s\n{self.output()}"
            ) from None

    def wait_for_ranks(self, timeout_seconds: float = 60) -> None:
        """Return once no process of this launch is left."""
        until = time.monotonic() + timeout_seconds
        while self._is_alive():
            assert time.monotonic() < until, self.output()
            time.sleep(0.05)

    def _is_alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def output(self) -> str:
        return self.log.read_text()

    def wait_for(
        self, text: str, timeout_seconds: float = 60, may_end: bool = False, behind: str = ""
    ) -> None:
        """Return once it has written a text, after another if that is given."""
        until = time.monotonic() + timeout_seconds
        while text not in (self.output().partition(behind)[2] if behind else self.output()):
            assert may_end or self.process.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.1)

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(10)


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    started: list[Launcher] = []

    def start(name: str, how: int | list[Any], *args: Any, **kwargs: Any) -> Launcher:
        started.append(Launcher(tmp_path, name, how, *args, **kwargs))
        return started[-1]

    yield start
    for launcher in started:
        launcher.end()
        print(f"--- {launcher.log.name}\n{launcher.output()}")  # shown where a test has failed


def results(out: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(Path(f"{out}.{m}").read_text()) for m in range(2)]


@pytest.mark.slow
def test_all_ways_to_launch_give_the_same_model(launch: Any, tmp_path: Path) -> None:
    """Over one host or two nodes, by one launcher or one per cluster, by deepspeed or torchrun."""
    config = ["--deepspeed_config", write_config(tmp_path / "ds.json")]

    def finished(way: str, *launchers: Launcher) -> list[list[dict[str, Any]]]:
        for launcher in launchers:
            assert launcher.wait() == 0, launcher.output()
        return results(tmp_path / way)

    def per_cluster(way: str, port: int, store: str, hows: list[Any]) -> list[list[dict[str, Any]]]:
        common = [*config, "--out", tmp_path / way, "--dsx-store", store]
        common += ["--dsx-rendezvous", f"tcp://127.0.0.1:{port}", "--dsx-cluster-id"]
        started = [launch(f"{way}{m}", how, *common, m) for m, how in enumerate(hows)]
        return finished(way, *started)

    one = finished("one", launch("one", 4, *config, "--out", tmp_path / "one"))
    with standalone_store() as port:
        assert per_cluster("two", port, "standalone", [2, 2]) == one
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    torchruns = [[*torchrun, "--master-port", free_port()] for _ in range(2)]
    assert per_cluster("torchruns", free_port(), "cluster_0", torchruns) == one
    (tmp_path / "hosts").write_text("node_a slots=2\nnode_b slots=2\n")
    where = ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    nodes = [
        launch(
            f"node{rank}",
            [
                "deepspeed",
                "--hostfile",
                tmp_path / "hosts",
                "--no_ssh",
                "--node_rank",
                rank,
                *where,
            ],
            *config,
            "--out",
            tmp_path / "nodes",
        )  # fmt: skip
        for rank in range(2)
    ]
    assert finished("nodes", *nodes) == one
    first, second = one
    assert first == second and len(first) == 2
    assert first[0]["checksum"] == first[1]["checksum"]


@contextmanager
def standalone_store() -> Generator[int, None, None]:
    port = free_port()
    command = [BIN / "dsx", "rendezvous", "--port", str(port), "--host", "127.0.0.1"]
    store = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    try:
        assert "listening" in store.stdout.readline()  # type: ignore[union-attr]
        yield port
    finally:
        store.send_signal(signal.SIGTERM)
        assert store.wait(10) == 0


@pytest.mark.ci
def test_a_killed_cluster_ends_the_other_and_leaves_checkpoints(
    launch: Any, tmp_path: Path
) -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    config, run = write_config(tmp_path / "ds.json", rendezvous=rendezvous), tmp_path / "run"
    document = json.loads(config.read_text())
    document["dsx"]["metrics"] = {"dir": str(run)}
    config.write_text(json.dumps(document))
    common = ["--deepspeed_config", config, "--save-dir", tmp_path / "saved", "--steps"]
    slow = [*common, 1000, "--step-seconds", 0.1, "--dsx-cluster-id"]
    clusters = [launch(f"killed{m}", 1, *slow, m, is_executed=True) for m in range(2)]
    for cluster in clusters:
        cluster.wait_for("saved 10")
    clusters[1].end()  # its launcher and its ranks, at once
    killed = time.monotonic()
    assert clusters[0].wait(30) != 0
    assert time.monotonic() - killed < 20
    output = clusters[0].output()
    assert "PeerLost: fragment " in output
    assert "cluster 1 closed its connection" in output
    assert f"resume from {tmp_path / 'saved' / 'cluster_0'}" in output
    abouts = read_about(run)
    assert abouts[0]["starts"][0]["end"]["how"].startswith("PeerLost: fragment ")
    assert abouts[1]["starts"][0]["end"] is None
    assert "cluster 0: PeerLost: fragment " in "".join(summarize(run).about)

    out = tmp_path / "resumed"
    resume = [*common, 30, "--resume", "--out", out, "--dsx-cluster-id"]
    clusters = [launch(f"resumed{m}", 1, *resume, m) for m in range(2)]
    for cluster in clusters:
        assert cluster.wait() == 0, cluster.output()
    started = {r["started_at"] for r in results(out)[0]}
    assert len(started) == 1 and min(started) >= 10
    for cluster, about in read_about(run).items():
        first, second = about["starts"]
        assert second["step"] in started and second["end"]["how"] == "finished"
        assert second["resumed_from"].startswith(str(tmp_path / "saved" / f"cluster_{cluster}"))
        assert second["resumed_session"] == first["session"] != second["session"]
        assert second["config"]["resolved"]["clusters"]["cluster_id"] == cluster
        saved = [Path(checkpoint["path"]).name for checkpoint in about["checkpoints"]]
        assert saved[:2] == ["step5", "step10"] and saved[-1] == "step30"
    assert [cluster.steps for cluster in summarize(run).clusters] == [30, 30]


@pytest.mark.ci
def test_ranks_whose_launcher_is_killed_save_and_so_does_the_other_cluster(
    launch: Any, tmp_path: Path
) -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    config = write_config(tmp_path / "ds.json", rendezvous=rendezvous)
    common = ["--deepspeed_config", config, "--save-dir", tmp_path / "saved", "--steps"]
    slow = [*common, 1000, "--step-seconds", 0.1, "--dsx-cluster-id"]
    clusters = [launch(f"orphaned{m}", 1, *slow, m) for m in range(2)]
    for cluster in clusters:
        cluster.wait_for("saved 10")
    # only the `deepspeed` process: its ranks must notice by themselves that they are orphans
    clusters[1].process.kill()
    killed = time.monotonic()
    assert clusters[0].wait(30) != 0
    clusters[1].wait()  # else it stays as a zombie of its group
    clusters[1].wait_for_ranks(30)
    assert time.monotonic() - killed < 20
    for m, cluster in enumerate(clusters):
        assert "told to end by SIGTERM (cluster 1)" in cluster.output(), cluster.output()
        tags = complete_tags(tmp_path / "saved" / f"cluster_{m}").values()
        assert max(tags, key=lambda tag: tag["step"])["is_preempted"]
    resume = [*common, 100, "--resume", "--out", tmp_path / "out", "--dsx-cluster-id"]
    clusters = [launch(f"resumed{m}", 1, *resume, m) for m in range(2)]
    for cluster in clusters:
        assert cluster.wait() == 0, cluster.output()
    assert all(result["started_at"] > 10 for result in results(tmp_path / "out")[0])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_ranks", "clusters", "args", "said"),
    [
        (
            1,
            {"rendezvous": "tcp://127.0.0.1:{port}", "join_deadline_seconds": 3},
            ["--dsx-cluster-id", 0],
            "cluster 1 of 2 did not come within 3 s (clusters.join_deadline_seconds)",
        ),
        (
            1,
            {"rendezvous": "tcp://127.0.0.1:{port}", "join_deadline_seconds": 3},
            ["--dsx-cluster-id", 1],
            "no rendezvous store answered at 127.0.0.1:",
        ),
        (1, {}, ["--dsx-cluster-id", 0], "no rendezvous is given"),
        (
            1,
            {"rendezvous": "tcp://127.0.0.1:{port}"},
            [],
            "say which one this is with --dsx-cluster-id",
        ),
        (3, {}, [], "clusters.num_clusters=2 does not divide the launcher's 3 ranks"),
        (1, {"num_cluster": 2}, [], "dsx.clusters.num_cluster is not a known key"),
    ],
    ids=["never comes", "no store", "no rendezvous", "which cluster", "uneven", "unknown key"],
)
def test_a_launch_that_cannot_work_says_why(
    num_ranks: int,
    clusters: dict[str, Any],
    args: list[Any],
    said: str,
    launch: Any,
    tmp_path: Path,
) -> None:
    if "rendezvous" in clusters:
        clusters = {**clusters, "rendezvous": clusters["rendezvous"].format(port=free_port())}
    config = write_config(tmp_path / "ds.json", **clusters)
    launcher = launch("bad", num_ranks, "--deepspeed_config", config, *args)
    assert launcher.wait(45) != 0
    assert said in launcher.output(), launcher.output()
