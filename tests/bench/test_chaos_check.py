"""The checker of `dsx bench chaos`, on logs that are right, and of each thing gone wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from dsx.bench.chaos.check import check
from dsx.bench.chaos.logs import Window
from dsx.bench.chaos.pauses import measure_pauses
from dsx.bench.chaos.plan import Plan
from dsx.bench.chaos.verdict import Verdict
from tests.bench.chaos_logs import KILL, LAST_STEP, LEAVE, PLAN, Logs, sound, the, without


def judge(logs: Logs, *windows: Window, away: Sequence[int] = ()) -> Verdict:
    return check(logs, windows, away, PLAN, LAST_STEP)


def test_what_is_right_is_found_to_be() -> None:
    verdict = judge(sound())
    assert verdict == Verdict(rounds=6, samples=36, loss=0.25) and verdict.is_good


def test_one_that_is_lost_and_whose_samples_others_read() -> None:
    verdict = judge(sound("killed"), KILL, away=[1])
    assert (verdict.rounds, verdict.rounds_lost, verdict.samples) == (6, 0, 30)
    assert verdict.problems == [] and verdict.is_good
    assert verdict.events == {"kill_cluster": 1} and verdict.joins == 0


def test_one_that_comes_back() -> None:
    verdict = judge(sound("killed", is_back=True), KILL)
    assert (verdict.rounds, verdict.joins, verdict.samples) == (6, 1, 34)
    assert verdict.problems == [] and verdict.is_good


def test_one_that_leaves_and_joins_again() -> None:
    verdict = judge(sound("left"), LEAVE, away=[1])
    assert verdict.problems == [] and verdict.is_good
    windows = [LEAVE, Window("join", 1, 8.25, 9.5)]
    verdict = judge(sound("left", is_back=True), *windows)
    assert verdict.problems == [] and verdict.is_good
    assert verdict.joins == 1 and verdict.events == {"join": 1, "leave": 1}


def hash_of_one_differs(logs: Logs) -> None:
    the(logs[1, 1], "commit", fragment=1, step=8)["hash"] = "another"


def one_has_refused_what_others_have_taken(logs: Logs) -> None:
    the(logs[2, 0], "commit", fragment=0, step=6)["what"] = "refused"


def one_says_that_others_were_averaged(logs: Logs) -> None:
    the(logs[2, 0], "commit", fragment=0, step=6)["members"] = [0, 2]


def one_lane_has_averaged_others(logs: Logs) -> None:
    for cluster in range(3):
        the(logs[cluster, 1], "commit", fragment=0, step=6)["members"] = [0, 2]


def one_has_never_applied(logs: Logs) -> None:
    without(logs[0, 0], the(logs[0, 0], "commit", fragment=1, step=12))


def nobody_has_applied(logs: Logs) -> None:
    for log in logs.values():
        without(log, the(log, "commit", fragment=0, step=10))


def one_lane_has_not_applied(logs: Logs) -> None:
    for cluster in range(3):
        without(logs[cluster, 1], the(logs[cluster, 1], "commit", fragment=0, step=10))


def one_lane_has_no_trace_of_it(logs: Logs) -> None:
    one_lane_has_not_applied(logs)
    for cluster in range(3):
        without(logs[cluster, 1], the(logs[cluster, 1], "launch", fragment=0, step=10))


def one_lane_has_refused(logs: Logs) -> None:
    for cluster in range(3):
        the(logs[cluster, 1], "commit", fragment=0, step=10)["what"] = "refused"


def nobody_has_launched(logs: Logs) -> None:
    nobody_has_applied(logs)
    for log in logs.values():
        without(log, the(log, "launch", fragment=0, step=10))


def one_has_not_launched(logs: Logs) -> None:
    for rank in range(2):
        without(logs[1, rank], the(logs[1, rank], "launch", fragment=0, step=10))


def something_was_launched_in_between(logs: Logs) -> None:
    for log in logs.values():
        for what in ("launch", "commit"):
            the(log, what, fragment=0, step=10)["step"] = 9


def all_have_refused_without_a_cause(logs: Logs) -> None:
    for log in logs.values():
        the(log, "commit", fragment=0, step=10)["what"] = "refused"


def all_have_refused_what_nobody_spoilt(logs: Logs) -> None:
    for log in logs.values():
        the(log, "commit", fragment=0, step=10).update(what="refused", by=[2])


def what_was_spoilt_is_in_the_mean(logs: Logs) -> None:
    for rank in range(2):
        the(logs[2, rank], "launch", fragment=0, step=10)["is_spoilt"] = True


def one_is_left_out_for_long(logs: Logs) -> None:
    for log in logs.values():
        for record in log:
            if record["what"] == "commit" and record["step"] >= 6:
                record["members"] = [0, 1]


def a_rank_counts_other_rounds(logs: Logs) -> None:
    the(logs[2, 1], "end")["rounds"] = [3, 2]


def models_differ(logs: Logs) -> None:
    the(logs[2, 1], "end")["hash"] = "another"


def one_does_not_end(logs: Logs) -> None:
    for rank in range(2):
        without(logs[1, rank], the(logs[1, rank], "end"))


def one_rank_does_not_end(logs: Logs) -> None:
    without(logs[1, 1], the(logs[1, 1], "end"))


def one_has_ended_and_is_not_named(logs: Logs) -> None:
    for log in logs.values():
        the(log, "end")["members"] = [0, 1]


def the_run_ends_early(logs: Logs) -> None:
    for log in logs.values():
        the(log, "end")["step"] = 11


def one_has_failed(logs: Logs) -> None:
    logs[1, 0].append({"what": "failed", "at": 13.0, "why": "PeerLost: somebody"})


def one_crashes_behind_the_end(logs: Logs) -> None:
    the(logs[1, 1], "exit")["status"] = -11


def one_stays_behind_the_end(logs: Logs) -> None:
    without(logs[1, 1], the(logs[1, 1], "exit"))


def nobody_has_ended(logs: Logs) -> None:
    for log in logs.values():
        without(log, the(log, "end"))


def a_step_is_passed_over(logs: Logs) -> None:
    without(logs[2, 1], the(logs[2, 1], "step", step=5))


def nobody_says_how_many_fragments(logs: Logs) -> None:
    for log in logs.values():
        without(log, the(log, "fragments"))


def a_save_fails_where_there_is_room(logs: Logs) -> None:
    logs[0, 0].insert(5, {"what": "not_saved", "at": 3.0, "step": 3, "why": "OSError: disk"})


BROKEN = {
    hash_of_one_differs: ("mismatches", "lane 1, fragment 1, launch of step 8"),
    one_has_refused_what_others_have_taken: ("mismatches", "fragment 0, launch of step 6"),
    one_says_that_others_were_averaged: ("mismatches", "fragment 0, launch of step 6"),
    one_lane_has_averaged_others: ("mismatches", "fragment 0, launch of step 6: lanes hold"),
    one_has_never_applied: ("rounds_lost", "fragment 1, launch of step 12: lost"),
    nobody_has_applied: ("rounds_lost", "fragment 0, launch of step 10: lost"),
    one_lane_has_not_applied: ("rounds_lost", "fragment 0, launch of step 10: lost"),
    one_lane_has_no_trace_of_it: ("rounds_lost", "fragment 0, launch of step 10: lost"),
    one_lane_has_refused: ("mismatches", "fragment 0, launch of step 10: lanes hold"),
    nobody_has_launched: ("rounds_lost", "fragment 0, launch of step 10: lost"),
    one_has_not_launched: ("rounds_lost", "fragment 0, launch of step 10: lost"),
    something_was_launched_in_between: ("rounds_lost", "step 9: launched, and nothing was due"),
    all_have_refused_without_a_cause: ("rounds_lost", "fragment 0, launch of step 10: lost"),
    all_have_refused_what_nobody_spoilt: ("rounds_lost", "refused for what cluster(s) [2]"),
    what_was_spoilt_is_in_the_mean: ("problems", "what cluster 2 contributed wrong on purpose"),
    one_is_left_out_for_long: ("problems", "step 8: cluster 2 was left out of its mean"),
    a_rank_counts_other_rounds: ("mismatches", "rank 1, has counted [3, 2] rounds"),
    models_differ: ("mismatches", "different models"),
    one_does_not_end: ("problems", "clusters [1] are said to be there"),
    one_rank_does_not_end: ("problems", "cluster 1, rank 1: it was there, and has not come to the"),
    one_has_ended_and_is_not_named: ("problems", "clusters [2] have come to the end, and are not"),
    the_run_ends_early: ("problems", "the end was to be at step 12, and came at 11"),
    one_has_failed: ("problems", "cluster 1, rank 0: PeerLost: somebody"),
    one_crashes_behind_the_end: ("problems", "rank 1: exit status -11, behind the end of its work"),
    one_stays_behind_the_end: (
        "problems",
        "rank 1: it has ended its work, and its process has not",
    ),
    nobody_has_ended: ("problems", "no rank has come to the end"),
    a_step_is_passed_over: ("problems", "cluster 2, rank 1: step 6 came behind step 4"),
    nobody_says_how_many_fragments: ("problems", "do not say how many fragments there are"),
    a_save_fails_where_there_is_room: ("problems", "step 3 was not saved: OSError: disk"),
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_what_is_wrong_is_found(breaks: Any) -> None:
    logs = sound()
    breaks(logs)
    verdict = judge(logs)
    what, said = BROKEN[breaks]
    assert getattr(verdict, what) and not verdict.is_good
    assert any(said in problem for problem in verdict.problems), verdict.problems


def one_is_told_and_stays(logs: Logs) -> None:
    for rank in range(2):
        without(logs[1, rank], the(logs[1, rank], "left"))


def its_last_launch_is_made_without_it(logs: Logs) -> None:
    for log in logs.values():
        the(log, "commit", step=6)["members"] = [0, 2]


def it_has_saved_nothing(logs: Logs) -> None:
    the(logs[1, 1], "left")["saved"] = []


def it_has_saved_before(logs: Logs) -> None:
    the(logs[1, 1], "left")["saved"] = [4]


def its_exit_status_is_not_0(logs: Logs) -> None:
    the(logs[1, 0], "exit", at=7.4)["status"] = 143


def nobody_reads_its_last_sample(logs: Logs) -> None:
    for rank in range(2):
        the(logs[0, rank], "step", step=8)["samples"].pop()


def its_committed_samples_are_read_again(logs: Logs) -> None:
    the(logs[2, 0], "step", step=9)["samples"].append(6 * 3 + 1)


def it_never_trains_again(logs: Logs) -> None:
    for rank in range(2):
        log = logs[1, rank]
        log[:] = [r for r in log if r["at"] < 9 or r["what"] not in ("step", "launch", "commit")]


def it_never_comes(logs: Logs) -> None:
    for rank in range(2):
        del logs[1, rank][next(i for i, r in enumerate(logs[1, rank]) if r["at"] > 8) :]


BROKEN_LEAVE = {
    one_is_told_and_stays: ("problems", "cluster 1, rank 0: it was told to leave, and has not"),
    its_last_launch_is_made_without_it: ("problems", "step 6: cluster 1 has left, and has not"),
    it_has_saved_nothing: ("problems", "cluster 1, rank 1: it has left at step 7, and saved at []"),
    it_has_saved_before: ("problems", "it has left at step 7, and saved at [4]"),
    its_exit_status_is_not_0: ("problems", "rank 0: exit status 143, behind the end of its work"),
    nobody_reads_its_last_sample: ("samples_lost", None),
    its_committed_samples_are_read_again: ("samples_twice", None),
    it_never_trains_again: ("problems", "cluster 1, rank 0: started again, and never trained"),
    it_never_comes: ("problems", "cluster 1 was to join, and was not started"),
}


@pytest.mark.parametrize("breaks", BROKEN_LEAVE, ids=lambda breaks: breaks.__name__)
def test_what_goes_wrong_where_one_leaves_and_joins_is_found(breaks: Any) -> None:
    logs = sound("left", is_back=True)
    breaks(logs)
    verdict = judge(logs, LEAVE, Window("join", 1, 8.25, 9.5))
    what, said = BROKEN_LEAVE[breaks]
    assert getattr(verdict, what) and not verdict.is_good
    assert said is None or any(said in problem for problem in verdict.problems), verdict.problems


def test_one_that_leaves_without_being_told() -> None:
    problems = judge(sound("left"), away=[1]).problems
    assert "cluster 1, rank 0: it has left, and nobody has told it to" in problems


def test_one_that_dies_by_itself() -> None:
    problems = judge(sound("killed"), away=[1]).problems
    assert any("and nobody has killed it: exit status -9" in problem for problem in problems)


def killed_late() -> tuple[Logs, Window]:
    """Cluster 1 is killed when it has been there for long."""
    logs = sound()
    for (cluster, _), log in logs.items():
        if cluster == 1:
            without(log, the(log, "end"))
            the(log, "exit")["status"] = -9
        else:
            the(log, "end")["members"] = [0, 2]
    return logs, Window("kill_rank", 1, 12.5, 14.0)


def test_one_that_was_killed_had_done_its_part_until_then() -> None:
    logs, window = killed_late()
    verdict = judge(logs, window, away=[1])
    assert verdict.problems == [] and verdict.is_good
    said = "fragment 1, launch of step 4: lost"
    without(logs[1, 1], the(logs[1, 1], "commit", step=4))
    assert judge(logs, window, away=[1]).problems == [said]
    logs, window = killed_late()
    without(logs[1, 1], the(logs[1, 1], "launch", step=4))
    assert judge(logs, window, away=[1]).problems == [said]
    logs, window = killed_late()
    for log in logs.values():
        the(log, "commit", step=4)["members"] = [0, 2]
    said = "fragment 1, launch of step 4: cluster 1 was left out of its mean, and was there"
    assert judge(logs, window, away=[1]).problems == [said]


def test_who_is_killed_ends_and_who_is_started_behind_that_does_not() -> None:
    logs, window = killed_late()
    the(logs[1, 1], "exit")["at"] = 15.0
    problems = judge(logs, window, away=[1]).problems
    assert "cluster 1, rank 1: it was killed, and lives on" in problems
    logs = sound("killed", is_back=True)
    without(logs[1, 0], the(logs[1, 0], "end"))
    the(logs[1, 0], "exit", at=13.5)["status"] = -9
    problems = judge(logs, Window("kill_cluster", 1, 6.25, 14.0)).problems
    assert any("nobody has killed it: exit status -9" in problem for problem in problems)


def test_who_was_to_contribute_what_is_wrong_has() -> None:
    problems = judge(sound(), Window("too_large", 2, 9.0, 11.0)).problems
    assert problems == [
        f"cluster 2, rank {rank}: too_large, and it has launched nothing wrong" for rank in (0, 1)
    ]


def full_disk() -> tuple[Logs, Window]:
    logs = sound()
    for rank in range(2):
        why = "rank 0: [Errno 28] No space left on device; 0 B are free there: 'step_5'"
        logs[2, rank].insert(4, {"what": "not_saved", "at": 5.0, "step": 5, "why": why})
        logs[2, rank].insert(5, {"what": "saved", "at": 7.0, "step": 7})
    return logs, Window("full_disk", 2, 4.5, 7.5)


def test_a_full_disk_has_saves_fail_by_name_and_nothing_else() -> None:
    logs, window = full_disk()
    verdict = judge(logs, window)
    assert verdict.problems == [] and verdict.is_good
    the(logs[2, 0], "not_saved")["why"] = "RuntimeError: something"
    said = "cluster 2, rank 0: a save without room has failed, and does not say so: RuntimeError"
    assert said in judge(logs, window).problems[0]
    logs, window = full_disk()
    without(logs[2, 1], the(logs[2, 1], "saved"))
    assert judge(logs, window).problems == [
        "cluster 2, rank 1: it has not saved again since its disk was full"
    ]
    without(logs[2, 1], the(logs[2, 1], "not_saved"))
    assert judge(logs, window).problems == [
        "cluster 2, rank 1: its disk was full, and no save has failed"
    ]
    logs, _ = full_disk()
    assert "cluster 2, rank 0: step 5 was not saved: rank 0" in judge(logs).problems[0]


def test_who_is_killed_as_leader_has_led() -> None:
    logs = sound("killed")
    window = Window("kill_leader", 1, 6.25, 8.0)
    said = "cluster 1 was killed as leader; 0 led then"
    assert judge(logs, window, away=[1]).problems == [said]
    for record in logs[1, 0]:
        if record["what"] == "step":
            record["leader"] = 1
    assert judge(logs, window, away=[1]).problems == []


def test_a_contribution_that_was_spoilt_on_purpose_is_no_round_that_is_lost() -> None:
    logs = sound()
    for (cluster, _), log in logs.items():
        the(log, "commit", fragment=0, step=10).update(what="refused", by=[2])
        the(log, "launch", fragment=0, step=10)["is_spoilt"] = cluster == 2
        the(log, "end")["rounds"] = [2, 3]
    verdict = judge(logs)
    assert (verdict.rounds, verdict.rounds_refused, verdict.rounds_lost) == (5, 1, 0)
    assert verdict.is_good


def test_what_a_process_has_read_and_not_committed_is_lost_unless_it_is_read_again() -> None:
    logs = sound("killed", is_back=True)
    for cluster in (0, 2):
        for rank in range(2):
            the(logs[cluster, rank], "step", step=8)["samples"].pop()
    assert judge(logs, KILL).samples_lost == 2  # the first process was at step 6, and committed 4
    for rank in range(2):
        the(logs[1, rank], "step", step=9)["samples"] = [5 * 3 + 1]
        the(logs[1, rank], "step", step=10)["samples"] = [6 * 3 + 1]
    verdict = judge(logs, KILL)
    assert (verdict.samples_lost, verdict.samples_twice) == (0, 0) and verdict.is_good
    for rank in range(2):
        the(logs[1, rank], "step", step=11)["samples"] = [4 * 3 + 1]
    verdict = judge(logs, KILL)
    assert (verdict.samples_lost, verdict.samples_twice) == (0, 1) and not verdict.is_good


def test_a_launch_is_of_the_process_that_has_made_it() -> None:
    """The first process had read for a step that the second one launches: it is not in there."""
    logs = sound("killed", is_back=True)
    for rank in range(2):  # it was ahead, up to step 9, and has read again nothing
        log = logs[1, rank]
        at = log.index(the(log, "exit", status=-9))
        log[at:at] = [
            {"what": "step", "at": 6.9, "step": step, "seconds": 0.5, "samples": [1000 + step],
             "members": [0, 1, 2], "leader": 0}
            for step in (7, 8, 9)
        ]  # fmt: skip
    verdict = judge(logs, KILL)
    assert verdict.samples_lost == 3


def test_samples_that_two_have_read() -> None:
    logs = sound()
    for rank in range(2):
        the(logs[0, rank], "step", step=3)["samples"] = [3 * 3 + 1]
    assert judge(logs).samples_twice == 1


def test_samples_of_all_ranks_count() -> None:
    logs = sound("killed")
    the(logs[1, 1], "step", step=6)["samples"] = [1000]  # which rank 0 has not read
    assert judge(logs, KILL, away=[1]).samples_lost == 1


def test_pauses_are_of_those_whom_a_fault_did_not_befall() -> None:
    logs = sound()
    the(logs[0, 0], "step", step=6)["seconds"] = 1.75
    the(logs[2, 0], "step", step=6)["seconds"] = 100.0
    verdict = judge(logs, Window("pause", 2, 5.5, 6.5), Window("reset", 0, 8.5, 9.5))
    assert verdict.events == {"pause": 1, "reset": 1}
    assert verdict.pause_max_seconds == 1.25
    assert verdict.pause_median_seconds == 0.625


def test_a_plan_says_what_is_due() -> None:
    assert Plan(6, in_turns=False).due(2, 13) == {(0, 6), (1, 6), (0, 12), (1, 12)}
    in_turns = Plan(8, in_turns=True)
    assert in_turns.due(4, 11) == {(0, 2), (1, 4), (2, 6), (3, 8), (0, 10)}
    assert in_turns.due(4, 5, (1, 2)) == {(0, 3), (1, 5)}  # a second stage is a step later


def test_a_long_run_is_judged_in_no_time() -> None:
    """A thousand faults of one run, and their thousand processes: nothing is looked for in all."""
    logs, windows = sound(), list[Window]()
    for log in logs.values():
        steps = [r for r in log if r["what"] == "step"]
        log[2:2] = [{**steps[0], "at": 0.6 + i * 1e-5, "seconds": 0.25} for i in range(10_000)]
    for number in range(2_000):
        windows.append(Window("reset", number % 3, 3.0 + number * 1e-4, 3.00005 + number * 1e-4))
    verdict = Verdict()
    began = time.process_time()
    measure_pauses(logs, windows, verdict)
    assert time.process_time() - began < 20  # where each step was held against each fault: minutes
    assert verdict.pause_max_seconds == 0.25
