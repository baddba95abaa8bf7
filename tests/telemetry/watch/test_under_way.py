"""What is under way, how a heal goes, what a process holds and what its links are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.html_report.page import read_numbers
from dsx.telemetry.html_report.sentences import what_cost_time
from dsx.telemetry.run_folder import cluster_file
from dsx.telemetry.watch.charts import BY_KEY, View, chart_data
from dsx.telemetry.watch.lanes import lanes
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.state import line_levels, state
from tests.telemetry.watch.folders import (
    BEGUN,
    about,
    append,
    healed,
    link,
    machine,
    make_run,
    of,
    say_time,
    step_record,
    sync_record,
    write_about,
)

OPEN = ("launched", "arrived", "applied")


def read(run: WatchedRun, now: float = BEGUN + 41) -> dict[str, Any]:
    while run.poll():
        pass
    return state(run, now)


def under_way(run: WatchedRun, fragment: int = 0) -> list[dict[str, Any]]:
    """Return the bars of a fragment whose record has not come."""
    read(run)
    rows = [row for row in lanes(run.clusters[0])["lanes"] if row["fragment"] == fragment]
    return [bar for row in rows for bar in row["bars"] if "round" not in bar]


def test_a_transfer_is_drawn_from_its_launch_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = WatchedRun(folder)
    append(folder, 0, of(0, "launch", 41, fragment=0))
    (bar,) = under_way(run)
    assert [bar[name] for name in OPEN] == [BEGUN + 41, None, None]
    assert bar["is_ahead"] and bar["launched_step"] == 41
    shown = lanes(run.clusters[0])
    assert shown["span"][1] == BEGUN + 41 and shown["stepped"] == BEGUN + 40
    assert shown["step_seconds"] == 1

    append(folder, 0, step_record(0, 41), step_record(0, 42, arrived=[[0, 41], [1, 38]]))
    (bar,) = under_way(run)
    assert [bar[name] for name in OPEN] == [BEGUN + 41, BEGUN + 42, None]
    assert "is_ahead" not in bar

    append(folder, 0, step_record(0, 43, applied=[[0, 41]]))
    (bar,) = under_way(run)
    assert [bar[name] for name in OPEN] == [BEGUN + 41, BEGUN + 42, BEGUN + 43]
    append(folder, 0, sync_record(0, 41, 43, fragment=0))
    assert not under_way(run)  # it has its record, with the seconds that it took
    last = lanes(run.clusters[0])["lanes"][0]["bars"][-1]
    assert last["applied"] == BEGUN + 43 and last["launched_step"] == 41


def test_what_is_under_way_ends_with_a_way_back_an_end_and_a_start(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = WatchedRun(folder)
    for last in (
        step_record(0, 39), of(0, "finish", 41), of(0, "start", 0, num_clusters=2),
        sync_record(0, 45, 46, fragment=0),
    ):  # fmt: skip
        append(folder, 0, step_record(0, 40), of(0, "launch", 41, fragment=0))
        assert len(under_way(run)) == 1
        append(folder, 0, last)
        assert not under_way(run), last["kind"]
    append(folder, 0, of(0, "launch", 47, fragment=0, stage=1), of(0, "launch", 47, fragment=1))
    append(folder, 0, step_record(0, 47, arrived=[[0, 47]]))  # of the first stage
    (bar,) = under_way(run)
    assert bar["arrived"] is None
    for step in range(100, 1100):
        append(folder, 0, of(0, "launch", step, fragment=step))
    read(run)
    assert len([*run.clusters[0].open_transfers]) == 256


def test_who_is_silent_waits_for_what_is_on_the_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    append(folder, 0, of(0, "launch", 41, fragment=3))
    found = read(WatchedRun(folder), BEGUN + 71)
    why = found["members"][0]["why"]
    assert why.endswith("fragment 3, sent at step 41, is on the line (30 s)")
    assert found["members"][1]["why"] == "no record for longer than five of its steps"


def test_memory_and_links_have_rows_tiles_and_charts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    append(
        folder, 0, of(0, "start", 0, num_clusters=2, outer_memory={"anchor": 60, "channels": 30})
    )
    for step in (10, 20, 40):
        held = {"process_bytes": 1000 + step, "outer_bytes": 80, "outer_planned_bytes": 90}
        links = [link(1, 100 * step, 10 * step, step / 1000)]
        append(folder, 0, of(0, "machine", step, links=links, **held))
    run = WatchedRun(folder)
    found = read(run)
    assert found["memory"] == [{"cluster": 0, **held, "plan": {"anchor": 60, "channels": 30}}]
    assert found["links"] == [
        {"of": 0, **link(1, 4000, 400, 0.04), "sent_bytes_per_second": 100.0,
         "received_bytes_per_second": 10.0}
    ]  # fmt: skip
    assert {chart["key"] for chart in found["charts"]} >= {"memory", "round_trip"}
    append(folder, 0, of(0, "machine", 41, links=[link(1, 7, 7, 0.0)]))  # another process
    (row,) = read(run)["links"]
    assert "sent_bytes_per_second" not in row
    append(folder, 0, step_record(0, 15))
    assert read(run) and len(run.clusters[0].machine) == 1


def test_a_line_is_shown_beside_what_it_was_measured_to(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert "measured" not in read(WatchedRun(folder))["traffic"]
    for cluster, measured in ((0, 2e6), (1, 1e6)):
        links = [{**link(1 - cluster, 9, 9, 0.01), "measured_bytes_per_second": measured}]
        append(folder, cluster, machine(cluster, 40, links=links,
                                        measured_bytes_per_second=measured / 2))  # fmt: skip
    run = WatchedRun(folder)
    found = read(run)
    assert found["traffic"]["measured"] == 0.5e6  # the slowest cluster's
    assert found["traffic"]["line"] == 250.0  # 500 bytes in 2 s, in each transfer
    assert [row["measured_bytes_per_second"] for row in found["links"]] == [2e6, 1e6]
    assert line_levels(run) == {"limit": 12.5e6, "measured": 0.5e6}
    lines = chart_data(BY_KEY["line"], run.clusters, View(), levels=line_levels(run))["lines"]
    assert [(line["name"], line["y"][0]) for line in lines[-2:]] == [
        ("limit", 12.5e6), ("measured", 0.5e6),
    ]  # fmt: skip


def test_of_many_links_the_slowest_are_shown_and_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    links = [link(to, 10, 10, to / 1000) for to in range(1, 128)]
    append(folder, 0, of(0, "machine", 40, links=links, process_bytes=1))
    found = read(WatchedRun(folder))
    assert [row["to"] for row in found["links"]] == [*range(127, 85, -1)]
    assert found["num_links"] == 127
    cost = " ".join(what_cost_time(read_numbers(folder)))
    assert cost.count("Round trip from") == 6 and "0 to 127" in cost and "0 to 121:" not in cost
    assert "Those were the longest of 127 links." in cost


def test_a_heal_is_told_in_bytes_while_it_goes_on_and_afterwards(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_about(folder, 1, about(1, host="elsewhere"))
    append(folder, 0, *[step_record(0, step) for step in range(41, 61)],
           of(0, "members", 44, members=[0]))  # fmt: skip
    run = WatchedRun(folder)
    for text, healing in (
        ("3 MB of 12 MB copied (25 %), step 0", {"copied": 0.25}),
        ("12 MB copied, 1 MB of results since, step 50", {}),
    ):
        with cluster_file(folder, "log", ".txt", 0).open("a") as log:
            line = f"WARNING dsx.training.joining: cluster 1 is healing: {text}\n"
            log.write(f"{say_time(BEGUN + 59)} {line}")
        row = read(run, BEGUN + 60)["members"][1]
        assert row["state"] == "heals" and row["why"] == text
        assert row["healing"].get("copied") == healing.get("copied")
    append(folder, 1, healed(1, 60), step_record(1, 61))
    texts = [event["text"] for event in read(run, BEGUN + 61)["events"]]
    assert (
        "came to the others at step 60: 9 MB of 12 MB copied from them, the rest from its own "
        "checkpoint; 1 MB of their results since; in 2.5 s" in texts
    )


@pytest.mark.parametrize("odd", ["x", [1], [[1]], [[1, "x"]], {"0": "x"}, [[-1, 4]]])
def test_fields_of_a_script_s_own_are_left_out(tmp_path: Path, odd: Any) -> None:
    folder = make_run(tmp_path / "run")
    append(folder, 0, of(0, "launch", 40, fragment=0), step_record(0, 41, arrived=odd, applied=odd))
    append(folder, 0, of(0, "machine", 41, links=odd, process_bytes=odd))
    append(folder, 0, of(0, "healed", 41, copied_bytes=odd), of(0, "start", 0, outer_memory=odd))
    found = read(WatchedRun(folder))
    assert found["step"] == 41 and not found["trouble"]
    assert found["memory"] == [{"cluster": 0, "plan": {}}] and not found["links"]
