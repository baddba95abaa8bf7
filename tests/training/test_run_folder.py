"""A run's folder by a real run: DeepSpeed in two clusters, stopped without an end and resumed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.run_folder import open_run, read_about
from tests.distributed import run_distributed
from tests.engines.engines import build_engine, quiet, train_step
from tests.installed import needs

pytestmark = needs("deepspeed")
KIND = (1, "fp32", "one", "json")
SAVED, STOPPED, LAST = 6, 8, 14


def train(run: str, resumes: bool) -> int:
    """Train up to STOPPED and be gone, or go on from SAVED to the end; return the first step."""
    quiet()
    metrics = {"dir": run, "trace": True}
    engine = build_engine(KIND, dsx=dsx_block(metrics))
    if resumes:
        engine.load_checkpoint(f"{run}/checkpoints")
    first = engine.dsx.step
    for step in range(first + 1, (LAST if resumes else STOPPED) + 1):
        train_step(engine, step)
        engine.dsx.log_step(loss=1.0 / step)
        if step in (SAVED, LAST):
            engine.save_checkpoint(f"{run}/checkpoints", tag=f"step{step}")
    if resumes:
        engine.dsx.finish()
        engine.dsx.close()
    while not resumes and not read_about(Path(run))[engine.dsx.cluster_id]["checkpoints"]:
        time.sleep(0.01)  # until what is written behind is there: the test kills this process
    return first


def dsx_block(metrics: dict[str, Any]) -> dict[str, Any]:
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    schedule = {"type": "periodic", "interval": 4}
    return {"preset": "diloco", "clusters": clusters, "schedule": schedule, "metrics": metrics}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert run_distributed(train, 2, str(folder), False) == [0, 0]
    stopped = open_run(folder)  # readable as it is
    assert [part.steps[-1]["step"] for part in stopped.clusters] == [STOPPED - 1] * 2
    assert run_distributed(train, 2, str(folder), True) == [SAVED, SAVED]
    return folder


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_run_json_says_what_ran(run: Path) -> None:
    for cluster, about in read_about(run).items():
        first, second = about["starts"]
        assert (first["step"], first["end"], first["resumed_from"]) == (0, None, None)
        assert (second["step"], second["end"]["how"]) == (SAVED, "finished")
        assert second["resumed_from"] == f"checkpoints/cluster_{cluster}/step{SAVED}"
        assert second["resumed_session"] == first["session"]
        assert second["versions"].keys() >= {"dsx", "python", "torch", "deepspeed"}
        assert (second["num_clusters"], second["ranks"], second["device"]) == (2, 1, "cpu")
        given, resolved = second["config"]["given"], second["config"]["resolved"]
        assert given["dsx"] == dsx_block({"dir": str(run), "trace": True})
        assert given["train_micro_batch_size_per_gpu"] == 3
        assert resolved["outer_optimizer"]["type"] == "nesterov"
        saved = [(c["path"], c["step"]) for c in about["checkpoints"]]
        where = f"checkpoints/cluster_{cluster}/step"
        assert saved == [(f"{where}{SAVED}", SAVED), (f"{where}{LAST}", LAST)]
        for name, pattern in about["files"].items():
            assert list(run.glob(pattern)), (name, pattern)


def test_records_go_on_where_the_checkpoint_was(run: Path) -> None:
    for part in open_run(run).clusters:
        assert [step["step"] for step in part.steps] == list(range(1, LAST + 1))
        assert part.finish is not None and part.finish["step"] == LAST


@pytest.mark.parametrize("inside", [".", "checkpoints", f"checkpoints/cluster_1/step{SAVED}"])
def test_commands_take_the_folder_or_what_is_in_it(run: Path, inside: str, tmp_path: Path) -> None:
    path = run / inside
    printed = invoke("report", path)
    assert "diloco, 2 clusters of 1 ranks, begun 20" in printed and "started 2 times" in printed
    assert f"all clusters: finished at step {LAST}" in printed
    assert f"last checkpoint: {run}/checkpoints/cluster_0/step{LAST}" in printed
    assert (run / "plot.png").exists()
    assert f"steps {SAVED + 1} to {LAST}" in invoke("trace", path, "--steps", f"{SAVED + 1}-{LAST}")
    assert json.loads(invoke("plan", "--from-run", path, "--gbps", 1, "--json"))["candidates"]
    printed = invoke("export", path, "--out", tmp_path)
    step = SAVED if inside.endswith(str(SAVED)) else LAST
    assert f"at step {step}" in printed and load_file(tmp_path / "model.safetensors")
