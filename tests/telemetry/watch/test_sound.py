"""A record that is not as dsx writes it is left out and counted, and takes down nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsx.telemetry.html_report.page import page_of_run, read_numbers
from dsx.telemetry.run_folder import cluster_file
from dsx.telemetry.top.show import screen
from dsx.telemetry.top.standing import RunFiles
from dsx.telemetry.watch.charts import CHARTS, View, chart_data, has_chart
from dsx.telemetry.watch.lanes import lanes
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.state import state
from tests.telemetry.watch.folders import (
    BEGUN,
    about,
    append,
    make_run,
    step_record,
    sync_record,
    write_about,
)

HUGE = 10**400
AT = {"cluster": 0, "time": BEGUN + 41, "step": 41}


def show(folder: Path) -> dict[str, Any]:
    """Show a run in all ways there are; return what the page has of it."""
    run = WatchedRun(folder)
    while run.poll():
        pass
    found = state(run, BEGUN + 41)
    json.dumps(found)
    for cluster in run.clusters:
        lanes(cluster)
    for chart in CHARTS:
        if has_chart(chart, run.clusters):
            chart_data(chart, run.clusters, View())
    page_of_run(read_numbers(folder))
    files = RunFiles(folder)
    Console(quiet=True).print(screen("run", files.look(), files.events(3), 160))
    return found


@pytest.mark.parametrize(
    "record",
    [
        {**AT, "kind": "members"}, {**AT, "kind": "members", "members": 3},
        {**AT, "kind": "launch"}, {**AT, "kind": "machine", "step": "x"},
        {**AT, "kind": "healed", "step": 1.5},
        {**AT, "kind": "launch", "step": 1, "fragment": 0, "stage": "x"},
        {**AT, "kind": "planned", "planned_steps": "many"}, {**AT, "kind": "rollback"},
        {**AT, "kind": "order", "time": "now"}, {**AT, "kind": ["step"]}, {**AT},
        {**AT, "kind": "start", "num_clusters": 1 << 40}, {**AT, "kind": "validation", "step": "x"},
        {k: v for k, v in sync_record(0, 37, 40).items() if k != "time"},
        sync_record(0, 37, 40, time=HUGE), sync_record(0, 37, 40, refused_by=1),
        sync_record(0, 37, 40, numel="x"), sync_record(0, 37, 40, launched_step=None),
        {**step_record(0, 41), "step": HUGE}, step_record(0, 41, time=None), ["step"], 41,
    ],
)  # fmt: skip
def test_a_record_of_something_else_is_counted(tmp_path: Path, record: Any) -> None:
    folder = make_run(tmp_path / "run")
    append(folder, 0, record)
    found = show(folder)
    assert found["step"] == 40
    assert found["trouble"] == "1 line was no record of dsx"


@pytest.mark.parametrize(
    "record",
    [
        step_record(0, 41, loss="nan"), step_record(0, 41, bytes_sent="x"),
        step_record(0, 41, loss=[1], seconds="long", blocked_seconds={}, tokens=HUGE),
        step_record(0, 41, loss=HUGE), step_record(0, 41, loss=1e308, skipped_steps="no"),
        sync_record(0, 37, 40, wait_seconds="x", interval=[], pseudo_gradient_norm=HUGE),
        {**AT, "kind": "finish", "bytes_sent": "x"}, {**AT, "kind": "order"},
    ],
)  # fmt: skip
def test_what_is_no_number_is_left_out_and_the_rest_stays(tmp_path: Path, record: Any) -> None:
    folder = make_run(tmp_path / "run")
    append(folder, 0, record)
    found = show(folder)
    assert found["step"] == (41 if record["kind"] == "step" else 40)
    assert found["trouble"] == ""


def test_a_line_that_is_nested_without_end_is_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with cluster_file(folder, "metrics", ".jsonl", 0).open("a") as file:
        file.write('{"kind": ' + "[" * 200_000 + "\n")
    append(folder, 0, step_record(0, 41))
    found = show(folder)
    assert (found["step"], found["trouble"]) == (41, "1 line was no record of dsx")


@pytest.mark.parametrize(
    "more",
    [
        {"end": {"how": "finished"}}, {"end": "yes"}, {"end": {"time": "noon", "step": 3}},
        {"pid": None}, {"pid": HUGE}, {"config": {"resolved": 3}},
        {"config": {"resolved": {"link": {"rate_mbit": "fast"}}}}, {"num_clusters": "two"},
        {"rolled_back": "why"},
    ],
)  # fmt: skip
def test_an_odd_start_is_shown_as_far_as_it_goes(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = make_run(tmp_path / "run")
    write_about(folder, 0, about(0, **more))
    found = show(folder)
    assert found["trouble"].startswith("what run.json says of cluster 0 is in part not of dsx")
    assert found["members"][0]["state"] == ("ended" if "end" in more else "trains")


def test_it_is_said_what_runs_whatever_its_settings_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    said = "Preset 'diloco' with 2 clusters of 1 rank on cpu."
    limit = "Each cluster may send 100 Mbit/s (link.rate_mbit)."
    for axes, words in (
        ({}, ""),
        ({"schedule": {"type": "periodic", "interval": 16},
          "outer_optimizer": {"type": "nesterov", "lr": 0.7, "momentum": "much"}},
         "Schedule is periodic (interval=16); the outer optimizer is nesterov (lr=0.7). "),
        ({"schedule": 3, "delay": [], "outer_optimizer": "none"}, ""),
    ):  # fmt: skip
        settings = {"preset": "diloco", "link": {"rate_mbit": 100}, **axes}
        write_about(folder, 0, about(0, config={"resolved": settings}))
        assert show(folder)["what"] == f"{said} {words}{limit}"


def test_odd_checkpoints_and_times_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    told = about(0)
    good = {
        "step": 8,
        "tag": "step8",
        "path": "checkpoints/step8",
        "time": told["starts"][0]["time"],
    }
    odd = [{k: v for k, v in good.items() if k != "tag"}, {**good, "time": "noon"}, 3]
    told["checkpoints"] = [good, *odd]
    told["starts"].insert(0, {**told["starts"][0], "time": 17})
    write_about(folder, 0, told)
    found = show(folder)
    assert found["checkpoints"]["count"] == 1
    assert found["num_starts"] == 1
