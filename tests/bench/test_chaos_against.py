"""`dsx bench chaos --against torchft`: what it gives to torchft and shows, and a run of both."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dsx.bench.chaos.against.bench import Comparison
from dsx.bench.chaos.against.groups import Groups
from dsx.bench.chaos.against.inflicting import inflict
from dsx.bench.chaos.against.job import (
    KINDS,
    LEFT_OUT,
    LIGHTHOUSE,
    job_of,
    require_comparable,
)
from dsx.bench.chaos.against.row import Times, back, row_of_dsx
from dsx.bench.chaos.against.show import show
from dsx.bench.chaos.bench import Course, Options, Report
from dsx.bench.chaos.faults import KINDS as ALL_KINDS
from dsx.bench.chaos.faults import Fault
from dsx.bench.chaos.forking import NoProgress
from dsx.bench.chaos.logs import Window
from dsx.bench.chaos.verdict import Verdict
from dsx.cli import app
from tests.bench.test_chaos import run
from tests.bench.test_chaos_against_check import EVERYBODY, job, judge, sound
from tests.installed import needs


class FakeNursery:
    """Has said what it is given, and notes what it is asked for."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.asked: list[int] = []

    def hear(self, seconds: float) -> list[dict[str, Any]]:
        told, self.told = self.told, []
        return told

    def ask(self, **fields: Any) -> None:
        self.asked.append(fields["cluster"])


def test_a_group_that_ends_by_itself_is_started_again_and_counted(tmp_path: Path) -> None:
    nursery: Any = FakeNursery()
    groups = Groups(replace(job(), directory=str(tmp_path)), nursery)
    nursery.told = [{"started": 10 + c, "cluster": c} for c in (*EVERYBODY, LIGHTHOUSE)]
    groups.look()
    assert groups.pids == {10: 0, 11: 1, 12: 2, 9: LIGHTHOUSE}
    (tmp_path / "rank_1_0.jsonl").write_text('{"what": "failed", "why": "RuntimeError: quorum"}\n')
    groups.alive.remove(2)  # it has been killed
    nursery.told = [
        {"ended": 11, "status": 1},
        {"ended": 12, "status": -9},
        {"ended": 9, "status": -9},
    ]
    groups.look()
    assert nursery.asked == [1]
    assert groups.own_ends == ["group 1 has ended by itself: RuntimeError: quorum"]
    assert [r["what"] for r in groups.logs()[2, 0]] == ["exit"]
    with pytest.raises(NoProgress, match=r"the end: not so within 0 s; groups are at steps \{0: 0"):
        groups.until(lambda: False, "the end: not so", 0.0)
    groups.own_ends *= 30
    with pytest.raises(NoProgress, match="the end: groups end by themselves: group 1"):
        groups.until(lambda: False, "the end")


def test_faults_come_at_their_times_to_whom_they_have_befallen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, sign: killed.append((pid, sign)))

    class Fake:
        """A run in which all go on at once, and processes are of numbers of their clusters."""

        def __init__(self) -> None:
            self.alive, self.done = [*EVERYBODY], list[str]()

        def look(self) -> None: ...

        def until(self, is_so: object, what: str) -> None: ...

        def until_all_go_on(self, what: str) -> None:
            self.done.append(f"{self.alive} go on")

        def processes_of(self, cluster: int) -> list[int]:
            return [100 + cluster]

        def launch(self, cluster: int) -> None:
            self.done.append(f"launch {cluster}")

        def bring_back(self, cluster: int) -> None:
            self.alive = sorted([*self.alive, cluster])
            self.done.append(f"bring back {cluster}")

    groups: Any = Fake()
    faults = [
        Fault("kill_cluster", 1), Fault("kill_leader", 1), Fault("leave", 2),
        Fault("pause", 0, seconds=0.3), Fault("join", 2), Fault("join", 2),
    ]  # fmt: skip
    began = time.monotonic()
    found = [*inflict(groups, faults, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7], KINDS, True)]
    windows, late = zip(*found, strict=True)
    assert [window.begin - began > 0.1 * (i + 2) for i, window in enumerate(windows)] == [True] * 6
    assert late[4] > 0.1  # the pause has lasted over its time
    assert [window.cluster for window in windows] == [1, LIGHTHOUSE, 2, 0, 2, 2]
    kill, term = signal.SIGKILL, signal.SIGTERM
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    assert killed == [(101, kill), (99, kill), (102, term), (100, stop), (100, go_on)]
    assert groups.done == [
        "[0, 2] go on", "bring back 1", "launch -1", "[0, 1, 2] go on", "[0, 1] go on",
        "[0, 1] go on", "bring back 2", "[0, 1, 2] go on", "[0, 1, 2] go on",
    ]  # fmt: skip


def options(tmp_path: Path, **choices: Any) -> Options:
    return Options(tmp_path / "out", **{"kinds": KINDS, **choices})


def test_who_is_back_is_one_that_was_killed_or_joins(tmp_path: Path) -> None:
    kinds = ("kill_rank", "kill_leader", "pause", "leave", "join")
    windows = [Window(kind, 0, 10.0, 12.0 + i) for i, kind in enumerate(kinds)]
    assert back(windows, options(tmp_path)) == Times(4.0, 6.0, 8.0)
    assert back(windows, options(tmp_path, comes_back=False)) == Times(6.0, 6.0, 6.0)


def test_torchft_has_the_method_of_dsx_as_far_as_it_can(tmp_path: Path) -> None:
    found = job_of(options(tmp_path, suspect_seconds=5.0))
    assert (found.interval, found.fragments, found.every) == (8, 4, 2)
    assert found.delay == 1  # of 3: torchft has one fragment under way at a time
    assert (found.alpha, found.outer_lr, found.outer_momentum) == (0.5, 0.4, 0.9)
    assert found.heartbeat_timeout_seconds == 5.0
    found = job_of(options(tmp_path, preset="diloco"))
    assert (found.interval, found.fragments, found.delay, found.outer_lr) == (6, 1, 0, 0.7)


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def refused(match: str, **choices: Any) -> None:
        with pytest.raises(ValueError, match=match):
            require_comparable("torchft", options(tmp_path, **choices))

    refused("--preset delayed is not served with --against torchft", preset="delayed")
    refused("--kinds reset cannot be compared with torchft: .*gloo", kinds=["pause", "reset"])
    refused("--kinds too_large cannot be compared", kinds=["too_large"])
    refused("--engine megatron is not served", engine="megatron")
    require_comparable("torchft", options(tmp_path))
    with pytest.raises(ValueError, match="--against='jax' is not known; allowed: 'torchft'"):
        require_comparable("jax", options(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("--against torchft needs torchft, .*not installed: pip install torchft")


def test_every_kind_is_given_to_torchft_or_left_out_by_name() -> None:
    assert {*KINDS} | {*LEFT_OUT} == {*ALL_KINDS} and not {*KINDS} & {*LEFT_OUT}


def test_without_torchft_the_command_ends_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = ["bench", "chaos", "--against", "torchft", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and not (tmp_path / "run").exists()
    assert done.output.splitlines() == [
        "dsx bench chaos: --against torchft needs torchft, which is not installed: pip install "
        "torchft"
    ]


def test_both_rows_are_in_one_table_and_in_the_json(tmp_path: Path) -> None:
    verdict = Verdict(rounds=7, rounds_lost=1, loss=0.5, events={"pause": 2})
    windows = [Window("pause", 1, 11.0, 11.5), Window("join", 1, 12.0, 14.5)]
    course = Course(windows, 10.0, 9.0, 40, 1.5, [0.25, 0.75], 40)
    assert course.fault_seconds == [1.0, 2.0]
    report = Report(options(tmp_path), [], verdict, None, {}, course=course)
    of = job()
    found = Comparison(
        "0.2.0", of, row_of_dsx(report), judge(sound(of), of), {}, [0.0, 3.0],
        ["group 1 has ended by itself: because"], ["it has got stuck"], LEFT_OUT,
    )  # fmt: skip
    told = json.loads(json.dumps(found.as_json()))
    assert told["name"] == "torchft" and told["ours"]["rounds_due"] == 8
    assert told["ours"]["pauses"]["median_seconds"] == 0.5
    assert told["ours"]["back"]["max_seconds"] == 2.5
    assert told["theirs"]["rounds_kept"] == 6 and told["left_out"]["reset"]
    console = Console(record=True, width=100)
    show(found, console)
    text = console.export_text()
    for line in (
        "rounds due", "1 fault(s) came later to torchft, by up to 3.0 s", "- it has got stuck",
        "- group 1 has ended by itself: because",
    ):  # fmt: skip
        assert line in text


@pytest.mark.ci
@pytest.mark.timeout(900)
@needs("torchft")
def test_torchft_is_given_the_faults_of_dsx(tmp_path: Path) -> None:
    words = ["--against", "torchft", "--clusters", "3", "--ranks", "1", "--events", "4"]
    words += ["--kinds", "kill_rank,kill_leader,pause,leave", "--seed", "2"]
    found = run(tmp_path, *words, "--suspect-seconds", "5", "--no-undisturbed")
    ours, theirs = found["against"]["ours"], found["against"]["theirs"]
    assert found["problems"] == [] and found["against"]["problems"] == []
    assert ours["faults"] == theirs["faults"] == len(found["faults"]) == 4
    for row in (ours, theirs):
        assert row["rounds_due"] == row["rounds_kept"] + row["rounds_lost"] > 100
        assert row["loss"] < 0.01 and row["mismatches"] == 0
        assert 0 < row["steps_in_vain"] < row["steps"]
    assert theirs["pauses"]["max_seconds"] > 4  # torchft notices a death by missing heartbeats
