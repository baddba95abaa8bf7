"""`dsx bench chaos --against torchft`: its checker on made-up logs, and a run of both."""

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
from dsx.bench.chaos.against.check import check
from dsx.bench.chaos.against.groups import Groups
from dsx.bench.chaos.against.inflicting import inflict
from dsx.bench.chaos.against.job import (
    KINDS,
    LEFT_OUT,
    LIGHTHOUSE,
    GroupJob,
    job_of,
    require_comparable,
)
from dsx.bench.chaos.against.row import Row, Times, back, row_of_dsx
from dsx.bench.chaos.against.show import show
from dsx.bench.chaos.bench import Course, Options, Report
from dsx.bench.chaos.faults import KINDS as ALL_KINDS
from dsx.bench.chaos.faults import Fault
from dsx.bench.chaos.forking import NoProgress
from dsx.bench.chaos.in_vain import steps_in_vain
from dsx.bench.chaos.logs import Rank, Record, Window
from dsx.bench.chaos.verdict import Verdict
from dsx.cli import app
from tests.bench.chaos_logs import sound as sound_of_dsx
from tests.bench.chaos_logs import the
from tests.bench.test_chaos import run
from tests.installed import needs

EVERYBODY = [0, 1, 2]
LAST = 12  # steps: a round every second one

Logs = dict[Rank, list[Record]]


def job(fragments: int = 2, delay: int = 0) -> GroupJob:
    return GroupJob("/run", 3, 0, 0.03, 2 * fragments, fragments, delay, 0.5, 0.4, 0.9, 5.0)


def step(cluster: int, count: int, at: float) -> Record:
    return {
        "what": "step", "at": at, "seconds": 0.5, "count": count, "step": count,
        "samples": [100 * cluster + int(at)], "members": EVERYBODY, "loss": 1.0,
    }  # fmt: skip


def round_(number: int, count: int, at: float, of: GroupJob, is_kept: bool = True) -> Record:
    return {
        "what": "round", "at": at + 0.1, "round": number, "count": count, "quorum": 1,
        "prepared": count - of.delay, "fragment": number % of.fragments, "is_kept": is_kept,
        "hash": f"{number}" if is_kept else None, "members": EVERYBODY,
    }  # fmt: skip


def sound(of: GroupJob) -> Logs:
    """Return what three groups write that keep a round every second step, and end together."""
    logs: Logs = {}
    for cluster in EVERYBODY:
        log: list[Record] = [{"what": "begin", "at": 0.5}]
        for count in range(1, LAST + 1):
            log.append(step(cluster, count, float(count)))
            if count % 2 == 0:
                log.append(round_(count // 2 - 1, count, float(count), of))
        log.append({"what": "end", "at": 13.0, "round": LAST // 2, "count": LAST})
        logs[cluster, 0] = log
    return logs


def killed(logs: Logs, cluster: int, behind: int) -> None:
    """Let a group end behind a step of its own, and write nothing more."""
    log = logs[cluster, 0]
    log[:] = [r for r in log if r["what"] == "begin" or r.get("count", 99) <= behind]
    log.append({"what": "exit", "at": behind + 0.3, "status": -9})


def judge(logs: Logs, of: GroupJob, *windows: Window) -> Row:
    return check(logs, windows, of, Options(Path("/nowhere"), kinds=KINDS), 0.25, 13.0)


def counts(row: Row) -> tuple[int, int, int, int, int]:
    return (
        row.rounds_due, row.rounds_kept, row.rounds_lost, row.rounds_kept_by_some, row.mismatches
    )  # fmt: skip


def work(row: Row) -> tuple[int, float, int]:
    return row.steps, row.steps_in_vain, row.samples_lost


@pytest.mark.parametrize("of", [job(), job(1), job(2, 1)], ids=["two", "one", "delay"])
def test_where_all_is_kept_nothing_is_in_vain(of: GroupJob) -> None:
    row = judge(sound(of), of)
    assert counts(row) == (6, 6, 0, 0, 0)
    assert work(row) == (36, 0.0, 0)
    assert row.loss == 0.25 and row.pauses == Times(None, None, None)


def test_a_round_that_nobody_keeps_is_lost_with_what_its_fragment_has_learnt() -> None:
    of = job()
    logs = sound(of)
    for log in logs.values():  # of fragment 0, which has last been in the round of step 2
        the(log, "round", count=6).update(is_kept=False, hash=None)
        for later in (8, 10, 12):
            one = the(log, "round", count=later)
            one.update(round=later // 2 - 2, fragment=(later // 2) % 2, quorum=2)
        the(log, "end")["round"] = 5
    row = judge(logs, of)
    assert counts(row) == (6, 5, 1, 0, 0)
    assert work(row) == (36, 3 * 4 / 2, 0)  # steps 3 to 6, half of each: fragment 1 has the rest


def test_with_one_fragment_the_samples_of_a_lost_round_are_lost() -> None:
    of = job(1)
    logs = sound(of)
    for log in logs.values():
        the(log, "round", count=6).update(is_kept=False, hash=None)
    assert work(judge(logs, of)) == (36, 6.0, 6)  # steps 5 and 6 of all


def test_who_has_not_kept_a_round_that_others_have_takes_it_from_them() -> None:
    of = job(1)
    logs = sound(of)
    the(logs[1, 0], "round", count=6).update(is_kept=False, hash=None)
    place = next(i for i, r in enumerate(logs[1, 0]) if r.get("count") == 8)
    logs[1, 0].insert(place, {"what": "heal", "at": 7.9, "count": 8})
    row = judge(logs, of)
    assert counts(row) == (6, 6, 0, 1, 0)
    assert work(row) == (36, 4.0, 4)  # steps 5 to 8 of that one


def test_who_is_killed_loses_what_is_in_no_round() -> None:
    of = job()
    logs = sound(of)
    killed(logs, 1, 7)
    for cluster in (0, 2):
        for record in logs[cluster, 0]:
            if record["what"] == "round" and record["count"] > 7:
                record["members"] = [0, 2]
    row = judge(logs, of, Window("kill_cluster", 1, 7.2, 9.5))
    assert counts(row) == (6, 6, 0, 0, 0)
    assert work(row) == (31, (1 + 3) / 2, 1)  # of one fragment since step 6, of the other since 4
    assert row.faults == 1 and row.pauses == Times(0.0, 0.0, 0.0)


def test_what_it_had_no_time_to_tell_is_told_by_the_others() -> None:
    of = job()
    logs = sound(of)
    killed(logs, 1, 7)
    for cluster in (0, 2):
        for record in logs[cluster, 0]:
            if record["what"] == "round" and record["count"] > 8:
                record["members"] = [0, 2]
    assert work(judge(logs, of)) == (31, 0.5, 0)  # step 7 is in the round of step 8


def test_one_that_comes_back_trains_for_nothing_until_it_is_healed() -> None:
    of = job()
    logs = sound(of)
    killed(logs, 1, 6)
    logs[1, 0] += [{"what": "begin", "at": 8.5}, step(1, 1, 9.0)]
    logs[1, 0] += [{"what": "heal", "at": 9.9, "count": 2}, step(1, 2, 10.0)]
    logs[1, 0] += [round_(4, 2, 10.0, of), step(1, 3, 11.0), step(1, 4, 12.0)]
    logs[1, 0] += [round_(5, 4, 12.0, of), {"what": "end", "at": 13.0, "round": 6, "count": 4}]
    for cluster in (0, 2):
        the(logs[cluster, 0], "round", count=8)["members"] = [0, 2]
    row = judge(logs, of)
    assert counts(row) == (6, 6, 0, 0, 0)
    assert work(row) == (34, 1.0 + 2.0, 2)  # steps 5 and 6 of a fragment; and both before it healed


def test_groups_that_keep_other_bits_are_told() -> None:
    of = job()
    logs = sound(of)
    the(logs[2, 0], "round", count=4)["hash"] = "another"
    assert judge(logs, of).mismatches == 1


def test_what_is_written_behind_the_end_does_not_count() -> None:
    of = job()
    logs = sound(of)
    for cluster in EVERYBODY:
        logs[cluster, 0] += [step(cluster, 13, 13.5), step(cluster, 14, 14.0)]
        logs[cluster, 0].append(round_(6, 14, 14.0, of, is_kept=False))
    row = judge(logs, of)
    assert counts(row) == (6, 6, 0, 0, 0) and work(row) == (36, 0.0, 0)


def test_a_run_that_has_got_stuck_has_a_row_all_the_same() -> None:
    of = job()
    logs = sound(of)
    for cluster in EVERYBODY:
        killed(logs, cluster, 5)
    logs[1, 0] = []  # of this one nothing was ever written
    row = judge(logs, of)
    assert counts(row) == (2, 2, 0, 0, 0)
    assert work(row) == (10, 2 * (1 + 3) / 2, 2)
    assert judge({(0, 0): []}, of).rounds_due == 0


def test_a_pause_of_survivors_is_beyond_their_usual_step() -> None:
    of = job()
    logs = sound(of)
    the(logs[0, 0], "step", count=8)["seconds"] = 5.5
    window = Window("kill_cluster", 1, 7.2, 9.5)
    assert judge(logs, of, window).pauses == Times(5.0, 5.0, 5.0)
    assert judge(logs, of, Window("pause", 0, 7.2, 9.5)).pauses.max_seconds == 0.0


def test_steps_in_vain_of_dsx_are_those_in_no_mean() -> None:
    assert steps_in_vain(sound_of_dsx()) == (36, 0.0)
    # of fragment 0 steps 3 to 6 of cluster 1, of fragment 1 its steps 5 and 6
    assert steps_in_vain(sound_of_dsx("killed")) == (30, 3.0)
    logs = sound_of_dsx()
    for log in logs.values():
        the(log, "commit", fragment=0, step=6)["members"] = [0, 2]
    assert steps_in_vain(logs) == (36, 2.0)  # half of steps 3 to 6 of cluster 1
    logs = sound_of_dsx()
    log = logs[1, 0]
    log[:] = [r for r in log if r["what"] not in ("launch", "commit", "end") or r["at"] < 11]
    assert steps_in_vain(logs) == (36, 1.0)  # 12 is said by the others; step 11, 12 of fragment 0


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
