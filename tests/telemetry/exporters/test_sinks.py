"""Sinks by their own libraries, without a network: the same names and numbers in all of them."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.config.schema import load_config
from dsx.core import renamed
from dsx.core.renamed import RenamedWarning
from dsx.telemetry.behind import Behind
from dsx.telemetry.exporters.outlet import Outlet
from dsx.telemetry.exporters.sink import Kind, Start, numbers_of
from dsx.telemetry.metrics import Metrics
from tests.installed import needs

NAMES = {
    "start/num_clusters": [(0, 2.0)],
    "sync/fragment_0/mean_norm": [(1, 2.5), (2, 2.5)],
    "step/seconds": [(1, 0.5), (2, 0.5)],
    "step/loss": [(1, 1.0), (2, 0.5)],
    "validation/loss": [(2, 3.0)],
}
START = {"step": 0, "preset": "diloco", "axes": {"schedule": {"interval": 4}}, "num_clusters": 2}
Found = dict[str, list[tuple[int, float]]]


def write(directory: Path, to: list[str]) -> None:
    metrics = Metrics(1, to)
    metrics.begin(directory, 0)
    metrics.event("start", {**START, "parameters": [{"w": [2, 2]}]})
    for step in (1, 2):
        metrics.event("sync", {"applied_step": step, "fragment": 0, "mean_norm": 2.5})
        metrics.step({"step": step, "seconds": 0.5})
        metrics.complete_step({"loss": 1.0 / step})
    metrics.event("validation", {"step": 2, "loss": 3.0})
    metrics.close()


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))


def test_names_of_a_pipeline_have_the_stage() -> None:
    line = {"kind": "sync", "stage": 3, "fragment": 2, "bytes_sent": 9, "applied_step": 4,
            "time": 1.0, "cluster": 0, "refused_by": [1]}  # fmt: skip
    assert numbers_of(line) == {
        "sync/stage_3/fragment_2/bytes_sent": 9, "sync/stage_3/fragment_2/applied_step": 4,
        "sync/stage_3/fragment_2/stage": 3, "sync/stage_3/fragment_2/fragment": 2,
    }  # fmt: skip


def test_of_a_cluster_s_links_there_are_the_longest_round_trip_and_all_bytes() -> None:
    links = [
        {"to": 1, "round_trip_seconds": 0.02, "least_seconds": 0.01, "sent_bytes": 5},
        {"to": 2, "round_trip_seconds": 0.03, "sent_bytes": 7, "received_bytes": 1},
    ]
    line = {"kind": "machine", "time": 1.0, "step": 9, "cluster": 0, "process_bytes": 40}
    assert numbers_of({**line, "links": links}) == {
        "machine/process_bytes": 40, "machine/links_round_trip_seconds": 0.03,
        "machine/links_sent_bytes": 12, "machine/links_received_bytes": 1,
    }  # fmt: skip
    assert numbers_of({**line, "links": []}) == {"machine/process_bytes": 40}


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path / "first", ["tensorboard"])
    board = EventAccumulator(str(tmp_path / "first" / "tensorboard" / "cluster_1"))
    board.Reload()
    found = {n: [(s.step, s.value) for s in board.Scalars(n)] for n in board.Tags()["scalars"]}
    assert found.items() >= NAMES.items()


@needs("wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    write(tmp_path / "first", ["wandb"])
    (file,) = (tmp_path / "first" / "wandb" / "cluster_1").rglob("run-*.wandb")
    until = time.monotonic() + 30  # the library's own process writes on when its finish returns
    run, found = read_wandb(file)
    while not found.items() >= NAMES.items() and time.monotonic() < until:
        time.sleep(0.05)
        run, found = read_wandb(file)
    assert (run.run_group, run.display_name, run.project) == ("first", "first cluster 1", "dsx")
    assert found.items() >= NAMES.items()


def read_wandb(file: Path) -> tuple[Any, Found]:
    """Return the run and its numbers, from the records of a file of the library's."""
    from wandb.proto.wandb_internal_pb2 import Record

    run: Any = None
    found: Found = {}
    for data in _leveldb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run" and run is None:
            run = record.run
        if kind == "history":
            items = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            for name in items.keys() - {"inner_step"}:
                found.setdefault(name, []).append((items["inner_step"], items[name]))
    return run, found


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    at, whole, block = 7, b"", 32768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_in_the_folder_of_the_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    write(tmp_path / "first", ["mlflow"])
    client = MlflowClient(f"sqlite:///{tmp_path}/first/mlflow/cluster_1.db")
    experiment = client.get_experiment_by_name("first")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first cluster 1" and run.info.status == "FINISHED"
    assert run.data.params["schedule.interval"] == "4" and run.data.params["preset"] == "diloco"
    for name, values in NAMES.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in history] == values, name


class Kept:
    """A sink that keeps what it is given, and fails where a step says so."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def describe(self, record: Any) -> None:
        pass

    def write(self, numbers: Any, step: int, time: float) -> None:
        if step == 2:
            raise RuntimeError("the network is down")
        self.got.append((step, numbers))

    def close(self) -> None:
        self.closed += 1


def test_a_sink_that_fails_takes_numbers_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    outlet = Outlet(Kind("far", lambda start: kept))
    for step in (1, 2, 3):
        line = {"kind": "step", "step": step, "time": 0.0, "loss": math.inf}
        outlet.write(line, Start(tmp_path / "first", 0, None))
    outlet.close()
    assert [step for step, _ in kept.got] == [1, 3] and kept.closed == 1
    assert "first/far cannot be written: the network is down; training goes on" in caplog.text
    assert "by file: far: 1 (the network is down)" in caplog.text


def test_a_sink_that_hangs_holds_no_rollback_up_and_what_it_has_not_taken_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsx.telemetry.exporters.outlet._CLOSE_SECONDS", 0.5)
    goes_on, kept = threading.Event(), Kept()
    monkeypatch.setattr(kept, "write", lambda *line: goes_on.wait(30))
    outlet = Outlet(Kind("far", lambda start: kept))
    for step in range(1, 11):
        line = {"kind": "step", "step": step, "time": 0.0, "loss": 1.0}
        outlet.write(line, Start(tmp_path / "first", 0, None))
    began = time.monotonic()
    outlet.end()  # as a rollback does
    assert time.monotonic() - began < 0.3
    outlet.close()
    goes_on.set()
    assert re.search(r"by file: far: 1[01] \(it does not answer\)", caplog.text), caplog.text


def test_a_record_behind_the_close_is_written_as_the_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    kept = Kept()
    outlet = Outlet(Kind("far", lambda start: kept))
    for step in (1, 2):
        line = {"kind": "step", "step": step + 2, "time": 0.0, "loss": 1.0}
        outlet.write(line, Start(tmp_path / "first", 0, None))
        outlet.close() if step == 1 else at_exit[-1]()
    assert at_exit.count(outlet.close) == 2
    assert [step for step, _ in kept.got] == [3, 4] and kept.closed == 2


def test_a_sink_that_cannot_be_opened_is_not_tried_for_each_record(tmp_path: Path) -> None:
    tries: list[Start] = []

    def fail(start: Start) -> Any:
        tries.append(start)
        raise RuntimeError("nobody answers")

    outlet = Outlet(Kind("far", fail))
    for step in range(5):
        line = {"kind": "step", "step": step, "time": 0.0, "loss": 1.0}
        outlet.write(line, Start(tmp_path / "first", 0, None))
    outlet.close()
    assert len(tries) == 1


def test_mlflow_holds_what_a_server_does_not_take_and_ends_its_run(tmp_path: Path) -> None:
    from dsx.telemetry.exporters import mlflow

    client = FlakyClient()
    entities = SimpleNamespace(Metric=lambda *metric: metric)
    run = mlflow._Run(lambda tracking_uri: client, entities, Start(tmp_path, 0, None))
    run._logged_at = 0.0  # it is time
    with pytest.raises(ConnectionError):
        run.write({"step/loss": 1.0}, 1, 1.0)
    client.fails = False
    run.write({"step/loss": 2.0}, 2, 3.0)
    run.close()
    assert [metric[0:2] for metric in client.got] == [("step/loss", 1.0), ("step/loss", 2.0)]
    client.fails = True
    run.write({"step/loss": 3.0}, 3, 9.0)
    with pytest.raises(ConnectionError):
        run.close()
    assert client.num_ended == 2


class FlakyClient:
    def __init__(self) -> None:
        self.fails, self.got, self.num_ended = True, list[Any](), 0

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=1)

    def create_run(self, *args: Any, **more: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, id: str, metrics: Any) -> None:
        if self.fails:
            raise ConnectionError("503")
        self.got += metrics

    def set_terminated(self, id: str) -> None:
        self.num_ended += 1


def test_a_program_that_closes_nothing_has_its_numbers_written(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from dsx.telemetry.exporters.outlet import Outlet\n"
        "from dsx.telemetry.exporters.sink import Kind, Start\n"
        "from tests.telemetry.exporters.test_sinks import Kept\n"
        "kept = Kept(); kept.close = lambda: print('closed', kept.got)\n"
        "outlet = Outlet(Kind('far', lambda start: kept))\n"
        "line = {'kind': 'step', 'step': 7, 'time': 0.0, 'loss': 1.5}\n"
        "outlet.write(line, Start(Path('a'), 0, None)); raise SystemExit(3)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout) == (3, "closed [(7, {'step/loss': 1.5})]\n"), run.stderr


@pytest.mark.parametrize(
    ("name", "module"), [("wandb", "wandb"), ("mlflow", "mlflow"),
                         ("tensorboard", "torch.utils.tensorboard")],
)  # fmt: skip
def test_what_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "dsx-train\[{name}\]"'):
        Outlet.find(name, Behind())


def test_the_old_spelling_works_and_names_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "_told", set())
    clusters = {"num_clusters": 2}
    for metrics in ({"tensorboard": True}, {"tensorboard": True, "to": ["tensorboard"]}):
        block = {"preset": "diloco", "clusters": clusters, "metrics": {"dir": "r", **metrics}}
        monkeypatch.setattr(renamed, "_told", set())
        with pytest.warns(RenamedWarning, match=r'tensorboard=true is now "to": \["tensorboard"\]'):
            config = load_config({"dsx": block})
        assert config.metrics.to == ("tensorboard",) and not config.metrics.tensorboard


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_has_one_of_many_short_steps_and_the_last(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    sink = Outlet.find("mlflow", Behind())._kind.open(Start(tmp_path / "first", 0, None))
    for step in range(1, 101):
        sink.write({"step/loss": float(step)}, step, 1000.0 + 0.03 * step)
        sink.write({"sync/fragment_0/mean_norm": 1.0}, step, 1000.0 + 0.03 * step)
    sink.close()
    client = MlflowClient(f"sqlite:///{tmp_path}/first/mlflow/cluster_0.db")
    (run,) = client.search_runs([client.get_experiment_by_name("first").experiment_id])
    found = [one.step for one in client.get_metric_history(run.info.run_id, "step/loss")]
    assert found == [1, 35, 69, 100]
    assert len(client.get_metric_history(run.info.run_id, "sync/fragment_0/mean_norm")) == 100
