"""The checker of `dsx bench chaos --against torchft`, on made-up logs: right, and gone wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsx.bench.chaos.against.check import check
from dsx.bench.chaos.against.job import KINDS, GroupJob
from dsx.bench.chaos.against.row import Row, Times
from dsx.bench.chaos.bench import Options
from dsx.bench.chaos.in_vain import steps_in_vain
from dsx.bench.chaos.logs import Rank, Record, Window
from tests.bench.chaos_logs import sound as sound_of_dsx
from tests.bench.chaos_logs import the

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


def test_what_is_trained_while_a_round_is_under_way_is_in_the_next_one() -> None:
    of = job(1, 1)
    logs = sound(of)
    killed(logs, 1, 6)
    for cluster in (0, 2):
        the(logs[cluster, 0], "round", count=8)["members"] = [0, 2]
        the(logs[cluster, 0], "round", count=10)["members"] = [0, 2]
        the(logs[cluster, 0], "round", count=12)["members"] = [0, 2]
    assert work(judge(logs, of)) == (30, 1.0, 1)  # the round that it ended in has step 5


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
