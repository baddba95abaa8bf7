"""A run's folder by a real run: DeepSpeed in two clusters, stopped without an end and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.run_folder import open_run, read_about
from dsx.telemetry.trace.parts import trace_path
from tests.distributed import run_distributed
from tests.engines.engines import build_engine, quiet, train_step
from tests.installed import needs
from tests.levels import by_default
from tests.telemetry.trace.runs import records
from tests.tiny import batch

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
        engine.dsx.log_step(loss=1.0 / step, total_steps=LAST)
        if step in (SAVED, LAST):
            engine.save_checkpoint(f"{run}/checkpoints", tag=f"step{step}")
    if resumes:
        engine.dsx.finish()
        engine.dsx.close()
    engine.dsx._records._behind.flush()  # what is written behind: the test kills this process
    return first


def start_again(run: str) -> dict[str, Any]:
    """Start as before in a folder that is used, and go on from there, logging before the load."""
    quiet()
    block = dsx_block({"dir": run, "trace": True})
    first = build_engine(KIND, dsx=block)
    first.dsx.log("note", text="of a new run")
    for step in (1, 2, 3):
        train_step(first, step)
        if step == 2:
            first.save_checkpoint(f"{first.dsx.run_dir}/checkpoints", tag="two")
    first.dsx.close()
    second = build_engine(KIND, dsx=block)
    second.dsx.log("note", text="before the load")
    folders = [str(first.dsx.run_dir), str(second.dsx.run_dir)]
    train_forward(second)  # a span before it is known whose folder it is
    second.load_checkpoint(f"{first.dsx.run_dir}/checkpoints")
    train_step(second, 3)
    third = build_engine(KIND, dsx=block)
    third.load_checkpoint(f"{run}/checkpoints", tag=f"step{SAVED}")
    third.dsx.log("validation", loss=2.0)
    for handle in (second.dsx, third.dsx):
        handle.close()
        folders.append(str(handle.run_dir))
    return {"folders": folders, "left": sorted(path.name for path in Path(run).parent.iterdir())}


def train_forward(engine: Any) -> None:
    with torch.no_grad():
        engine(*batch(0, 1, 0))


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


def test_how_many_steps_are_planned_is_told_once_in_each_start(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    told = [record for line in lines if (record := json.loads(line))["kind"] == "planned"]
    assert [(one["step"], one["planned_steps"]) for one in told] == [(2, LAST), (SAVED + 2, LAST)]


def test_another_run_takes_nothing_away(run: Path) -> None:
    def files() -> dict[str, str]:
        kept = (".jsonl", ".json", ".gz")
        return {p.name: p.read_bytes().decode("latin1") for p in run.iterdir() if p.suffix in kept}

    before = files()
    everyone = run_distributed(start_again, 2, str(run))
    second = f"{run}-2"
    for found in everyone:
        assert found["folders"] == [second, f"{run}-3", second, str(run)]
        assert found["left"] == [run.name, f"{run.name}-2"]
    noted = json.dumps({"step": SAVED, "loss": 2.0})[1:-1]
    for name, text in files().items():
        assert text.startswith(before[name])
        more = text.removeprefix(before[name])
        assert (noted in more and more.count("\n") == 1) if "metrics" in name else not more, name
    for part in open_run(second).clusters:
        assert [step["step"] for step in part.steps] == [1, 2, 3]
        assert [start["step"] for start in part.about["starts"]] == [0, 2]
    written = [json.loads(line) for line in (Path(second) / "metrics.jsonl").open()]
    notes = [record["text"] for record in written if record["kind"] == "note"]
    assert notes == ["of a new run", "before the load"]
    assert f"{run} holds another run" in (Path(second) / "log.txt").read_text()
    spans = records(trace_path(Path(second), 1, 0))
    assert [s["step"] for s in spans if s["name"] == "optimizer step"] == [1, 2, 3]
    assert "steps 1 to 3" in invoke("trace", second)
    assert "started 2 times" in invoke("report", second)


@pytest.mark.parametrize(
    "inside",
    by_default([".", "checkpoints", ONE_TAG := f"checkpoints/cluster_1/step{SAVED}"], ".", ONE_TAG),
)
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
