"""A run's folder is followed, whatever order its files come in."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.run_folder import cluster_file
from dsx.telemetry.watch.charts import BY_KEY, View, chart_data
from dsx.telemetry.watch.lanes import lanes
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.state import state
from tests.telemetry.watch.folders import (
    BEGUN,
    about,
    append,
    make_run,
    records,
    say_time,
    step_record,
    sync_record,
    write_about,
)


def read(run: WatchedRun, now: float = BEGUN + 41) -> dict[str, Any]:
    while run.poll():
        pass
    return state(run, now)


def states(found: dict[str, Any]) -> list[str]:
    return [row["state"] for row in found["members"]]


def test_a_run_and_its_clusters_may_come_later(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    run = WatchedRun(folder)
    assert read(run)["phase"] == "waiting"
    write_about(folder, 0, about(0))
    append(folder, 0, *records(0, 10))
    found = read(run, BEGUN + 11)
    assert found["phase"] == "training"
    assert states(found) == ["trains", "unseen"]
    before = run.version
    write_about(folder, 1, about(1))
    append(folder, 1, *records(1, 9))
    found = read(run, BEGUN + 11)
    assert states(found) == ["trains", "trains"]
    assert [row["step"] for row in found["members"]] == [10, 9]
    assert run.version > before


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(FileNotFoundError, match="holds no metrics"):
        WatchedRun(tmp_path)


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    found = read(WatchedRun(make_run(tmp_path / "run")))
    assert found["step"] == 40
    assert found["tokens"] == 2 * 40 * 512
    assert found["utilization"] == pytest.approx(0.9)
    assert found["tokens_per_second"] == pytest.approx(1024)
    sent = 1000 * 5
    assert found["traffic"]["sent"] == sent
    assert found["traffic"]["data_parallel"] == 4 * 1000 * 40  # two fragments of 500, a ring of two
    assert found["traffic"]["hidden"] == pytest.approx(0.75)
    assert found["parity"]["checked"] == {"round": 4, "step": 40}
    assert found["members"][0]["interval"] == 8
    assert {chart["key"] for chart in found["charts"]} >= {"loss", "utilization", "line", "norms"}
    assert "compression" not in {chart["key"] for chart in found["charts"]}  # nothing of it is told
    assert "eta_seconds" not in found


def test_a_planned_length_gives_the_time_that_is_left(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    append(folder, 0, step_record(0, 41), {"cluster": 0, "kind": "planned", "time": BEGUN + 41,
                                           "step": 41, "planned_steps": 100})  # fmt: skip
    assert read(WatchedRun(folder), BEGUN + 42)["eta_seconds"] == pytest.approx(59)


def test_a_process_that_is_gone_is_seen_at_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_about(folder, 1, about(1, pid=child.pid))
    run = WatchedRun(folder)
    assert states(read(run)) == ["trains", "trains"]
    before = run.version
    child.kill()
    child.wait()
    assert states(read(run)) == ["trains", "killed"]
    assert run.version > before
    append(folder, 1, step_record(1, 41), step_record(1, 45))
    assert states(read(run, BEGUN + 46)) == ["trains", "trains"]  # another namespace's number


def test_of_another_host_only_silence_is_seen(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_about(folder, 1, about(1, host="elsewhere", pid=1))
    run = WatchedRun(folder)
    assert states(read(run, BEGUN + 49)) == ["trains", "trains"]
    assert states(read(run, BEGUN + 51)) == ["silent", "silent"]


def test_who_is_left_out_heals_and_comes_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_about(folder, 1, about(1, host="elsewhere"))
    run = WatchedRun(folder)
    more = [step_record(0, step) for step in range(41, 60)]
    append(folder, 0, *more, {"cluster": 0, "kind": "members", "time": BEGUN + 45, "step": 44,
                              "members": [0]})  # fmt: skip
    found = read(run, BEGUN + 60)
    assert states(found) == ["trains", "left out"]
    assert "from step 44 on, clusters 0 train" in [event["text"] for event in found["events"]]
    with cluster_file(folder, "log", ".txt", 0).open("a") as log:
        log.write(f"{say_time(BEGUN + 59)} WARNING dsx.training: cluster 1 is healing: 3 MB\n")
    found = read(run, BEGUN + 60)
    assert states(found) == ["trains", "heals"]
    assert found["members"][1]["why"] == "3 MB"
    append(folder, 0, {"cluster": 0, "kind": "members", "time": BEGUN + 62, "step": 61,
                       "members": [0, 1]})  # fmt: skip
    append(folder, 1, step_record(1, 62))
    assert states(read(run, BEGUN + 63)) == ["trains", "trains"]


def test_members_have_their_weight_and_the_rounds_that_they_spoiled(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=3)
    run = WatchedRun(folder)
    found = read(run)["members"]
    assert [row["weight"] for row in found] == [pytest.approx(1 / 3)] * 3
    assert not any("left_out" in row for row in found)
    assert [row["interval"] for row in found] == [8] * 3
    for cluster in (0, 2):  # both tell of the same rounds
        append(folder, cluster, sync_record(cluster, 41, 44, refused_by=[1]),
               sync_record(cluster, 45, 48, refused_by=[1, 1], idle_in=[2]))  # fmt: skip
    append(folder, 0, {"cluster": 0, "kind": "members", "time": BEGUN + 50, "step": 49,
                       "members": [0, 2]})  # fmt: skip
    found = read(run, BEGUN + 51)["members"]
    assert [row["weight"] for row in found] == [0.5, 0.0, 0.5]
    assert [row.get("left_out") for row in found] == [None, {"refused_by": 2}, {"idle_in": 1}]


def test_how_far_healing_has_come_and_how_long_it_takes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = WatchedRun(folder)
    append(folder, 0, *(step_record(0, step) for step in range(41, 81)))
    log = cluster_file(folder, "log", ".txt", 0)
    line = "{} WARNING dsx.training: cluster 1 is healing: {} MB, step {}\n"
    log.write_text(line.format(say_time(BEGUN + 70), 3, 41))
    row = read(run, BEGUN + 71)["members"][1]
    assert row["state"] == "heals" and row["healing"] == {"step": 41, "target": 80}
    with log.open("a") as file:
        file.write(line.format(say_time(BEGUN + 80), 9, 71))
    row = read(run, BEGUN + 81)["members"][1]
    assert row["why"] == "9 MB, step 71"
    assert row["healing"] == {  # the others take a step a second
        "step": 71, "target": 80, "steps_per_second": 3.0, "seconds_left": 4.5,
    }  # fmt: skip
    append(folder, 0, *(step_record(0, step) for step in range(81, 112)))
    with log.open("a") as file:
        file.write(line.format(say_time(BEGUN + 110), 9, 75))
    assert "seconds_left" not in read(run, BEGUN + 111)["members"][1]["healing"]


def test_a_line_that_is_too_long_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with cluster_file(folder, "metrics", ".jsonl", 1).open("a") as file:
        file.write("a" * (2 << 20) + "\n")
    append(folder, 1, step_record(1, 41))
    run = WatchedRun(folder)
    found = read(run)
    assert found["members"][1]["step"] == 41
    assert found["trouble"] == (
        "metrics.cluster_1.jsonl: 1 of its lines longer than 1 MiB, left out"
    )


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for cluster in (0, 1):
        end = {"time": say_time(BEGUN + 41), "step": 40, "how": "finished"}
        told = about(cluster, end=end)
        told["checkpoints"] = [{"path": f"c{cluster}/a", "tag": "a", "step": 40 - 8 * cluster,
                                "time": say_time(BEGUN + 40)}]  # fmt: skip
        write_about(folder, cluster, told)
    found = read(WatchedRun(folder), BEGUN + 9999)
    assert found["phase"] == "finished"
    assert states(found) == ["ended", "ended"]
    assert [row["clusters"] for row in found["checkpoints"]["rows"]] == [[0], [1]]
    assert "common_step" not in found["checkpoints"]
    assert "eta_seconds" not in found


def test_validation_is_of_the_records_until_the_script_has_summed_up(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = WatchedRun(folder)
    assert read(run)["validation"] == {}
    for cluster, told in enumerate(({"loss": 2.0}, {"eval_loss": 3.0, "eval_runtime": 9.0})):
        append(folder, cluster, {"cluster": cluster, "kind": "validation", "time": BEGUN + 40,
                                 "step": 40, **told})  # fmt: skip
    assert read(run)["validation"]["loss"] == 2.5
    (folder / "summary.json").write_text('{"val_loss_average": 2.25}')
    assert read(run)["validation"] == {"loss": 2.25, "of": "the average, at the end"}
    data = chart_data(BY_KEY["loss"], run.clusters, View("step"))
    assert [line["name"] for line in data["lines"]].count("validation") == 2


def test_steps_that_come_again_take_the_place_of_the_others(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=1)
    run = WatchedRun(folder)
    read(run)
    append(folder, 0, *(step_record(0, step, loss=9.0) for step in range(33, 37)))
    read(run)
    (cluster,) = run.clusters
    assert list(cluster.steps.read()["step"]) == list(range(1, 37))
    assert cluster.losses.read()["value"][-1] == 9.0
    assert cluster.steps.read()["tokens"][-1] == 36 * 512
    assert cluster.syncs.read()["step"][-1] == 32


def test_files_of_another_run_are_left_out_and_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_about(folder, 1, about(1, session="of-before", time=say_time(BEGUN - 99)))
    found = read(WatchedRun(folder))
    assert found["other_runs"] == [1]
    assert states(found) == ["trains", "unseen"]


def test_lines_that_are_no_records_end_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=1)
    with cluster_file(folder, "metrics", ".jsonl", 0).open("a") as file:
        file.write('{"kind": "step", "st\n[]\n3\n{"kind": "step", "step": null}\n\x00\n')
    append(folder, 0, step_record(0, 41))
    run = WatchedRun(folder)
    assert read(run)["step"] == 41
    assert run.clusters[0].num_unreadable == 5


def test_a_loss_that_is_no_number_is_a_gap_and_a_stretch_without_one_is_none(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    write_about(folder, 0, about(0, 1))
    for step in range(1, 13):
        record = step_record(0, step, loss=math.nan if step == 5 else 1.0)
        if step % 2 == 0:
            del record["loss"]
        append(folder, 0, record)
    run = WatchedRun(folder)
    read(run)
    data = chart_data(BY_KEY["loss"], run.clusters, View("step", points=100))
    (line,) = data["lines"]
    steps = [step for step, value in zip(data["x"], line["y"], strict=True) if value is not None]
    assert steps == [1, 3, 7, 9, 11]
    assert [data["x"][gap] for gap in line["gaps"]] == [5]


@pytest.mark.parametrize("axis", ["step", "time"])
def test_where_a_cluster_was_away_is_a_gap(tmp_path: Path, axis: Any) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    append(folder, 0, *records(0, 40, first=11))
    append(folder, 1, *records(1, 40, first=31))
    run = WatchedRun(folder)
    read(run)
    data = chart_data(BY_KEY["loss"], run.clusters, View(axis, points=40))
    here, away, _ = data["lines"]
    assert here["gaps"] == []
    places = [data["x"][gap] - (BEGUN if axis == "time" else 0) for gap in away["gaps"]]
    assert 11 <= min(places) <= 13
    assert 28 <= max(places) <= 31


def test_buckets_keep_peaks_and_are_the_same_for_all(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=400)
    append(folder, 0, step_record(0, 401, loss=77.0), *records(0, 500, first=402))
    run = WatchedRun(folder)
    read(run)
    data = chart_data(BY_KEY["loss"], run.clusters, View("step", points=10))
    assert len(data["x"]) == len(data["lines"][0]["y"]) <= 12
    assert max(v for v in data["lines"][0]["high"] if v) == 77.0
    assert data["lines"][1]["y"][-1] is None  # this cluster is not that far
    near = chart_data(BY_KEY["loss"], run.clusters, View("step", 395, 405, points=100))
    assert max(v for v in near["lines"][0]["y"] if v) == 77.0
    assert near["whole"] == [1, 500]
    last = chart_data(BY_KEY["loss"], run.clusters, View("step", points=100, last=0.1))
    assert last["span"] == pytest.approx([450.1, 500])


def test_another_run_is_drawn_as_its_average(tmp_path: Path) -> None:
    run, other = (WatchedRun(make_run(tmp_path / name)) for name in ("a", "b"))
    for each in (run, other):
        read(each)
    data = chart_data(BY_KEY["loss"], run.clusters, View("tokens"), other.clusters)
    names = [line["name"] for line in data["lines"]]
    assert names == ["", "", "average", "reference"]
    assert data["lines"][2]["y"] == data["lines"][3]["y"]


def test_the_way_of_fragments_is_in_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    append(folder, 0, sync_record(0, 37, 40, fragment=1, refused_by=[1], transfer_seconds=1.0))
    run = WatchedRun(folder)
    read(run)
    found = lanes(run.clusters[0], 1000.0)
    assert [lane["fragment"] for lane in found["lanes"]] == [0, 1]
    bar = found["lanes"][1]["bars"][-1]
    assert bar["launched"] == BEGUN + 37
    assert bar["arrived"] == BEGUN + 38
    assert bar["applied"] == BEGUN + 40
    assert bar["left_out"] == {"refused_by": [1]}


def test_tokens_that_are_told_late_are_an_axis_from_there_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_about(folder, 0, about(0, 1))
    append(folder, 0, *(step_record(0, n, tokens=None) for n in range(1, 6)))
    append(folder, 0, *(step_record(0, n) for n in range(6, 11)))
    run = WatchedRun(folder)
    assert read(run)["axes"] == ["step", "tokens", "time"]
    data = chart_data(BY_KEY["loss"], run.clusters, View("tokens", points=5))
    assert data["span"] == [512, 5 * 512]
    assert None not in data["lines"][0]["y"]


def test_a_later_run_of_the_same_name_is_told_of(tmp_path: Path) -> None:
    run = WatchedRun(make_run(tmp_path / "run"))
    run.beside_seconds = 0.0
    assert read(run)["newer"] is None
    make_run(tmp_path / "run-2")
    make_run(tmp_path / "run-of-others")
    assert read(run)["newer"] == str(tmp_path / "run-2")
    assert read(WatchedRun(tmp_path / "run-2"))["newer"] is None


def test_a_file_in_the_place_of_another_shows_what_it_has(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=1)
    run = WatchedRun(folder)
    read(run)
    path = cluster_file(folder, "metrics", ".jsonl", 0)
    path.rename(tmp_path / "old")
    append(folder, 0, *records(0, 7))
    assert read(run)["step"] == 7
    assert run.clusters[0].num_syncs == 0


def test_a_long_file_is_looked_at_before_it_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=1, steps=20_000)
    run = WatchedRun(folder)
    assert run.poll(0.0)
    (cluster,) = run.clusters
    steps = cluster.steps.read()["step"]
    assert 0 < len(steps) < 10_000
    assert steps[0] < 200
    assert steps[-1] >= 19_990
    assert "tokens" not in state(run, BEGUN)
    read(run)
    assert len(run.clusters[0].steps.read()["step"]) == 20_000


def test_a_file_that_cannot_be_read_loses_no_line_and_keeps_no_other_from_being_read(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run")
    log = cluster_file(folder, "log", ".txt", 0)
    log.mkdir()  # an error to read
    metrics = cluster_file(folder, "metrics", ".jsonl", 0)
    kept = metrics.rename(tmp_path / "kept")
    metrics.mkdir()
    run = WatchedRun(folder)
    found = read(run)
    assert [row.get("step") for row in found["members"]] == [None, 40]
    assert "log.txt" in found["trouble"] and "metrics.jsonl" in found["trouble"]
    metrics.rmdir()
    kept.rename(metrics)
    found = read(run)
    assert [row.get("step") for row in found["members"]] == [40, 40]
    assert found["trouble"].count("log.txt") == 1 and "metrics" not in found["trouble"]
    before = run.version
    log.rmdir()
    assert read(run)["trouble"] == ""
    assert run.version > before
