"""`/metrics` of `dsx watch`: the names and numbers of each rank's own page, from the records."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsx.method.alarms import BOUNDS
from dsx.telemetry.figures import FIGURES, MOST, Figures
from dsx.telemetry.prometheus import page_of
from dsx.telemetry.watch.replay import Replay
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.watch import Watch
from tests.installed import needs
from tests.telemetry.watch.folders import (
    about,
    append,
    link,
    machine,
    make_run,
    step_record,
    write_about,
)
from tests.telemetry.watch.test_server import ask

ALARMS = sorted({bound.kind for bound in BOUNDS})
pytestmark = needs("prometheus_client")
Found = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


def parsed(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return what prometheus-client's parser reads: by name, by labels."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        sample.name: {
            tuple(sorted(one.labels.items())): one.value
            for one in family.samples if one.name == sample.name
        }
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }  # fmt: skip


def of_cluster(found: Found, name: str, cluster: int = 0) -> float:
    return found[name][(("cluster", str(cluster)),)]


def about_run(cluster: int) -> dict[str, Any]:
    told = about(cluster, versions={"dsx": "1.2"})
    told["checkpoints"] = [
        {"path": "c", "tag": "t", "step": 32, "time": "2026-01-01T00:00:00Z"}
    ]  # fmt: skip
    return told


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run")
    for cluster in range(2):
        write_about(run, cluster, about_run(cluster))
        append(run, cluster, {"kind": "planned", "time": 1_760_000_041.0, "step": 40,
                              "planned_steps": 100})  # fmt: skip
        append(run, cluster, machine(cluster, 40, links=[link(1 - cluster, 5, 6, 0.02)]))
    return run


@pytest.fixture
def page(run: Path) -> Iterator[Watch]:
    watch = Watch(WatchedRun(run), sign_seconds=0.2, alarms=ALARMS)
    yield watch
    watch.close()


def metrics_at(page: Watch, step: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    until = time.monotonic() + 10
    while True:
        status, headers, text = ask(page, "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=")
        found = parsed(text)
        if found.get("dsx_step", {}).get((("cluster", "0"),)) == step and len(
            found["dsx_step"]
        ) == 2:  # fmt: skip
            return found
        assert time.monotonic() < until, found
        time.sleep(0.02)


def own_page(run: Path) -> bytes:
    """Return what rank 0 of cluster 0 would show, which was told the same at its boundaries."""
    asked = {
        "dsx_loss": 1.0, "dsx_tokens_total": 1.0, "dsx_planned_steps": 100.0,
        "dsx_line_limit_bytes_per_second": 1.25e7, "dsx_missing_records": 0.0,
    }  # fmt: skip
    figures = Figures(0, 2, True, ALARMS, {n: lambda v=v: v for n, v in asked.items()})
    figures.started("diloco", "1.2")
    figures.begin(0, 0, run)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            figures.step(record, (0, 1))
        elif record["kind"] == "sync":
            figures.sync(record)
        elif record["kind"] == "machine":
            figures.machine(record)
    figures.saved(run / "checkpoints" / "t", 32)
    figures._behind.flush()  # type: ignore[reportPrivateUsage]
    return page_of([figures])[1]


def test_names_and_numbers_are_those_of_the_ranks_own(run: Path, page: Watch) -> None:
    found, own = metrics_at(page, 40), parsed(own_page(run))
    assert {*found} - {"dsx_disk_free_bytes", "dsx_disk_size_bytes"} == (
        {*own} - {"dsx_disk_free_bytes", "dsx_disk_size_bytes"}
    )
    assert {*found} <= {figure.name for figure in FIGURES}
    differ = ("dsx_loss", "dsx_tokens_total", "dsx_checkpoint_timestamp_seconds")
    for name, values in own.items():
        for labels, value in values.items():
            if name not in differ and not name.startswith("dsx_disk"):
                assert found[name][labels] == pytest.approx(value), (name, labels)
    assert of_cluster(found, "dsx_tokens_total") == 40 * 512
    assert of_cluster(found, "dsx_planned_steps") == 100
    assert of_cluster(found, "dsx_checkpoint_timestamp_seconds") == 1767225600
    assert of_cluster(found, "dsx_step", 1) == 40
    text = ask(page, "/metrics")[2].decode()
    assert text.count("# TYPE dsx_step gauge") == 1


def test_counters_only_grow_where_a_run_goes_back(run: Path, page: Watch) -> None:
    before = metrics_at(page, 40)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:22]
    kept = [json.loads(line)["step"] for line in lines if b'"kind": "step"' in line][-1]
    (run / "metrics.new").write_bytes(b"".join(lines))
    (run / "metrics.new").replace(run / "metrics.jsonl")
    later = [
        step_record(0, step, time=1_760_000_100.0 + step) for step in range(kept + 1, kept + 6)
    ]
    append(run, 0, *later)
    after = metrics_at(page, kept + 5)
    assert of_cluster(after, "dsx_steps_total") == of_cluster(before, "dsx_steps_total") + 5
    assert of_cluster(after, "dsx_syncs_total") == of_cluster(before, "dsx_syncs_total")


def test_labels_are_bounded_and_odd_records_take_nothing_down() -> None:
    replay = Replay(0, ALARMS, None)
    sync = {"kind": "sync", "applied_step": 8, "launched_step": 4, "fragment": 0, "time": 1.0}
    for number in range(500):
        replay.take({**sync, "time": 1.0 + number, "fragment": number, "mean_norm": 1.0,
                     "pseudo_gradient_norm": "x", "guard_alarms": [f"<{number}>"]})  # fmt: skip
        replay.tell({"starts": [{"config": {"resolved": {"preset": "x" * number}}}]})
    replay.take({"kind": "step", "step": 9, "time": 600.0, "seconds": -1.0, "skipped_steps": -7})
    found = parsed(page_of([replay.figures])[1])
    assert len(found["dsx_fragment_mean_norm"]) == MOST
    assert len(found["dsx_guard_alarms_total"]) == len(ALARMS) + 1
    assert len(found["dsx_run_info"]) == 1
    assert of_cluster(found, "dsx_step_seconds_total") == 0


def test_who_may_read_is_as_of_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Watch(WatchedRun(run), asks_for_token=True)
    try:
        assert ask(page, "/metrics")[0] == 403
        token = page.address.partition("token=")[2]
        assert ask(page, "/metrics", Authorization=f"Bearer {token}")[0] == 200
        assert ask(page, "/metrics", "POST", Authorization=f"Bearer {token}")[0] == 405
    finally:
        page.close()

    def find_none(name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", find_none)
    page = Watch(WatchedRun(run))
    try:
        assert ask(page, "/metrics", Host="a.example")[0] == 421
        status, _, text = ask(page, "/metrics")
        assert status == 501 and b'pip install "dsx-train[prometheus]"' in text
        assert text.count(b"\n") == 1
    finally:
        page.close()
