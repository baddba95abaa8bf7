"""What a run is in numbers: counters that only grow, few series, and nothing that is not known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.telemetry.behind import Behind
from dsx.telemetry.figures import FIGURES, LABELS, MOST, Figures
from dsx.telemetry.progress import Progress

UNITS = ("_seconds", "_bytes", "_bytes_per_second", "_steps", "_rounds", "_ratio", "_info")
BARE = {  # numbers without a unit, or of what the name says
    "dsx_step", "dsx_checkpoint_step", "dsx_loss", "dsx_fragment_pseudo_gradient_norm",
    "dsx_fragment_mean_norm", "dsx_guard_cluster_cosine", "dsx_guard_autocorrelation",
    "dsx_guard_effective_gain", "dsx_guard_rungs", "dsx_clusters", "dsx_members",
    "dsx_member_trains", "dsx_missing_records", "dsx_checkpoint_copied_step",
}  # fmt: skip


def step(number: int, skipped: int = 0) -> dict[str, Any]:
    return {"step": number, "seconds": 2.0, "blocked_seconds": 0.5, "skipped_steps": skipped}


def sync(fragment: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "fragment": fragment, "round": 3, "launched_step": 10, "applied_step": 14, "interval": 10,
        "bytes_sent": 1000, "wait_seconds": 0.25, "transfer_seconds": 1.5, "coding_seconds": 0.1,
        "commit_seconds": 0.2, "pseudo_gradient_norm": 2.0, "mean_norm": 1.0, **more,
    }  # fmt: skip


def test_names_units_and_texts_keep_the_rules() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(names) == len(set(names))
    for figure in FIGURES:
        assert figure.name.startswith("dsx_") and figure.name == figure.name.lower(), figure
        assert (figure.kind == "counter") == figure.name.endswith("_total"), figure
        if figure.kind == "gauge":
            assert figure.name.endswith(UNITS) or figure.name in BARE, figure
        assert figure.meaning.endswith(".") and len(figure.meaning.split()) > 3, figure
        assert {*figure.labels} <= {*LABELS}, figure
    assert {*names} >= BARE


def test_what_a_process_holds_and_its_links_are_gauges() -> None:
    links = [{"to": m, "round_trip_seconds": 0.5, "least_seconds": 0.25} for m in (1, MOST)]
    told = {"process_bytes": 7, "outer_bytes": 5, "outer_planned_bytes": 6, "step": 3}
    figures, hidden = (Figures(0, MOST + 1, is_shown) for is_shown in (True, False))
    for one in (figures, hidden):
        one.machine({**told, "links": [*links, {"to": 2, "sent_bytes": 9}]})
    found = figures.read()
    assert [found[f"dsx_{name}_bytes"] for name in ("process", "outer_state")] == [
        {(): 7.0}, {(): 5.0},
    ]  # fmt: skip
    assert found["dsx_outer_state_planned_bytes"] == {(): 6.0} and not found["dsx_device_bytes"]
    assert found["dsx_link_round_trip_seconds"] == {("1",): 0.5}
    assert found["dsx_link_least_round_trip_seconds"] == {("1",): 0.25}
    assert not hidden.read()["dsx_process_bytes"]


def test_bytes_of_a_link_only_grow_and_stand_beside_what_it_was_measured_to() -> None:
    figures = Figures(0, 3, True)
    for sent, received in ((100, 7), (130, 9), (20, 1)):  # the last one by another process
        link = {"to": 2, "sent_bytes": sent, "received_bytes": received}
        link["measured_bytes_per_second"] = 11.75e6
        figures.machine({"links": [link], "measured_bytes_per_second": 10e6})
    found = figures.read()
    assert found["dsx_link_sent_bytes_total"] == {("2",): 150.0}
    assert found["dsx_link_received_bytes_total"] == {("2",): 10.0}
    assert found["dsx_link_measured_bytes_per_second"] == {("2",): 11.75e6}
    assert found["dsx_line_measured_bytes_per_second"] == {(): 10e6}


def test_a_step_and_a_sync_are_counted() -> None:
    figures = Figures(1, 3, True, ["gain", "far"])
    figures.begin(100, 4, None)
    figures.step(step(101, skipped=5), (0, 2))
    figures.step(step(102, skipped=5), (0, 2))
    figures.sync(sync(guard_alarms=["gain"], guard_rungs=["outer_lr"], cluster_cosine=0.5))
    figures.sync(sync(1, stage=1, refused_by=[2], differed_in=[], mean_norm=math.nan))
    found = figures.read()
    one = {name: values[()] for name, values in found.items() if () in values}
    assert (one["dsx_step"], one["dsx_steps_total"], one["dsx_skipped_steps_total"]) == (102, 2, 1)
    assert (one["dsx_step_seconds_total"], one["dsx_blocked_seconds_total"]) == (4.0, 1.0)
    assert (one["dsx_clusters"], one["dsx_members"]) == (3, 2)
    assert found["dsx_member_trains"] == {("0",): 1, ("1",): 0, ("2",): 1}
    assert (one["dsx_syncs_total"], one["dsx_sent_bytes_total"]) == (2, 2000)
    assert (one["dsx_wait_seconds_total"], one["dsx_transfer_seconds_total"]) == (0.5, 3.0)
    assert (one["dsx_interval_steps"], one["dsx_delay_steps"], one["dsx_guard_rungs"]) == (10, 4, 1)
    assert (one["dsx_refused_rounds_total"], one["dsx_parity_mismatches_total"]) == (1, 0)
    assert found["dsx_guard_alarms_total"] == {("gain",): 1, ("far",): 0}
    assert found["dsx_guard_cluster_cosine"] == {("0", "0"): 0.5}
    assert found["dsx_fragment_rounds"] == {("0", "0"): 3, ("1", "1"): 3}
    assert math.isnan(found["dsx_fragment_mean_norm"]["1", "1"])
    assert not found["dsx_loss"] and not found["dsx_checkpoint_step"]  # nobody knows of any


def test_counters_only_grow_where_a_run_goes_back() -> None:
    figures = Figures(0, 2, True)
    figures.begin(0, 0, None)
    for number in range(1, 5):
        figures.step(step(number, skipped=number), (0, 1))
    figures.begin(2, 2, None)
    figures.rolled_back()
    figures.step(step(3, skipped=2), (0, 1))
    found = {name: values.get(()) for name, values in figures.read().items()}
    assert (found["dsx_step"], found["dsx_steps_total"]) == (3, 5)
    assert (found["dsx_skipped_steps_total"], found["dsx_rollbacks_total"]) == (4, 1)


def test_series_of_fragments_and_members_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dsx")
    figures = Figures(0, 500, True)
    figures.begin(0, 0, None)
    figures.step(step(1), tuple(range(500)))
    for _ in range(2):
        for fragment in range(MOST + 9):
            figures.sync(sync(fragment))
    found = figures.read()
    assert len(found["dsx_fragment_rounds"]) == len(found["dsx_member_trains"]) == MOST
    assert found["dsx_syncs_total"] == {(): 2 * (MOST + 9)} and found["dsx_members"] == {(): 500}
    assert caplog.text.count("have no series") == 1


def test_nothing_is_kept_where_nobody_shows_it() -> None:
    figures = Figures(0, 2, False)
    figures.begin(0, 0, None)
    figures.step(step(1), (0, 1))
    figures.sync(sync())
    found = figures.read()
    assert found["dsx_steps_total"] == found["dsx_syncs_total"] == {(): 0}


def test_disks_are_those_of_records_and_checkpoints(tmp_path: Path) -> None:
    behind = Behind()
    figures = Figures(0, 2, True, behind=behind)
    figures.begin(0, 0, tmp_path / "not_made_yet")
    figures.step(step(1), (0, 1))
    behind.flush()
    assert figures.read()["dsx_disk_free_bytes"] == {}
    figures.saved(tmp_path / "step2", 2)
    figures.step(step(2), (0, 1))
    behind.flush()
    found = figures.read()
    assert found["dsx_disk_free_bytes"].keys() == {("checkpoints",)}
    of = ("checkpoints",)
    assert 0 < found["dsx_disk_free_bytes"][of] < found["dsx_disk_size_bytes"][of]
    assert found["dsx_checkpoint_step"] == {(): 2}
    figures.saved(tmp_path / "gone" / "step3", 3)
    figures.step(step(3), (0, 1))
    behind.close()
    assert figures.read()["dsx_disk_free_bytes"] == {}


def test_figures_that_are_asked_for_are_left_out_until_they_are_known() -> None:
    progress = Progress(0, 0.0, speaks=False, is_shown=True)
    asked = {"dsx_loss": lambda: progress.loss, "dsx_tokens_total": lambda: progress.tokens}
    figures = Figures(0, 2, True, asked=asked)
    assert progress.watches and not figures.read()["dsx_loss"]
    assert not figures.read()["dsx_tokens_total"]
    progress.see(loss=torch.tensor(3.5), tokens=64)
    progress.pass_boundary(1, 0.0)
    assert figures.read()["dsx_tokens_total"] == {(): 64}
    assert not figures.read()["dsx_loss"]  # a device is not waited for at each step
    progress._loss_read -= 60
    progress.pass_boundary(2, 0.0)
    assert figures.read()["dsx_loss"] == {(): 3.5}
    progress.note({"loss": 2.5, "tokens": 10})
    progress._loss_read -= 60
    progress.pass_boundary(3, 0.0)
    assert figures.read()["dsx_loss"] == {(): 2.5}  # what is told goes before what is seen
    assert figures.read()["dsx_tokens_total"] == {(): 10}
