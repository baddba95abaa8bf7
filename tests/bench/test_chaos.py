"""`dsx bench chaos`: its faults, its checker on logs that are right and wrong, and a run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.bench.chaos.check import Verdict, check
from dsx.bench.chaos.faults import KINDS, LOSSES, draw
from dsx.bench.chaos.job import Job, give_orders, orders_path
from dsx.bench.chaos.logs import Record, Tail, Window
from dsx.bench.chaos.worker import Orders
from dsx.cli import app

Logs = dict[tuple[int, int], list[Record]]


def test_faults_follow_from_the_seed_and_leave_two_clusters() -> None:
    drawn = draw(3, 200, 5, 2)
    assert drawn == draw(3, 200, 5, 2) != draw(4, 200, 5, 2)
    assert {fault.kind for fault in drawn} - LOSSES == {*KINDS} - LOSSES
    lost: list[int] = []
    for fault in drawn:
        assert fault.cluster not in lost and 0 <= fault.rank < 2
        if fault.kind in LOSSES:
            lost.append(fault.cluster)
    assert len(lost) == 3
    alone = draw(0, 50, 4, 2, ["kill_leader"])
    assert [fault.cluster for fault in alone] == [0, 1]


def sound(num_clusters: int = 3, lost: int | None = None) -> Logs:
    """Two fragments, H 4, 12 steps; a cluster that is lost ends in step 6, sent at 4 last."""
    logs: Logs = {}
    for cluster in range(num_clusters):
        for rank in range(2):
            log: list[Record] = [{"what": "begin", "at": 0.0}]
            for step in range(1, 13):
                if cluster == lost and step > 6:
                    break
                members = [c for c in range(num_clusters) if c != lost or step <= 6]
                log.append({
                    "what": "step", "at": float(step), "step": step, "seconds": 0.5,
                    "samples": [step * num_clusters + cluster], "members": members,
                })  # fmt: skip
                if step % 4 in (2, 0):
                    fragment = step % 4 // 2
                    of: dict[str, Any] = {"fragment": fragment, "step": step}
                    log.append({"what": "launch", "at": float(step), **of})
                    if cluster == lost and step == 6:
                        break
                    log.append({
                        "what": "commit", "at": float(step), **of, "by": [],
                        "members": [c for c in range(num_clusters) if c != lost or step < 6],
                        "hash": f"{rank} {fragment} {step}",
                    })  # fmt: skip
            if cluster != lost:
                members = [c for c in range(num_clusters) if c != lost]
                log.append({
                    "what": "end", "at": 13.0, "step": 12, "loss": 0.25, "hash": "the model",
                    "members": members,
                })  # fmt: skip
            logs[cluster, rank] = log
    return logs


def the(log: list[Record], what: str, **fields: Any) -> Record:
    """Return the one record of a kind with these fields."""
    (found,) = [r for r in log if r["what"] == what and fields.items() <= r.items()]
    return found


def without(log: list[Record], record: Record) -> None:
    log[:] = [other for other in log if other is not record]


def test_what_is_right_is_found_to_be() -> None:
    verdict = check(sound(), [])
    assert verdict == Verdict(rounds=6, samples=36, loss=0.25)
    assert verdict.is_good
    with_loss = check(sound(lost=1), [Window("kill_cluster", 1, 6.0, 8.0)], {1})
    assert (with_loss.rounds, with_loss.rounds_lost, with_loss.mismatches) == (6, 0, 0)
    assert with_loss.samples_lost == 2  # of steps 5 and 6: its last launch that was committed is 4
    assert with_loss.problems == [] and not with_loss.is_good


def hash_of_one_differs(logs: Logs) -> None:
    the(logs[1, 1], "commit", fragment=0, step=8)["hash"] = "another"


def one_has_refused_what_others_have_taken(logs: Logs) -> None:
    the(logs[2, 0], "commit", fragment=1, step=6)["what"] = "refused"


def one_has_never_applied(logs: Logs) -> None:
    without(logs[0, 0], the(logs[0, 0], "commit", fragment=0, step=12))


def nobody_has_applied(logs: Logs) -> None:
    for log in logs.values():
        without(log, the(log, "commit", fragment=1, step=10))


def all_have_refused_without_a_cause(logs: Logs) -> None:
    for log in logs.values():
        the(log, "commit", fragment=1, step=10)["what"] = "refused"


def models_differ(logs: Logs) -> None:
    logs[2, 1][-1]["hash"] = "another"


def one_does_not_end(logs: Logs) -> None:
    for rank in range(2):
        del logs[1, rank][-1]


def one_has_failed(logs: Logs) -> None:
    logs[1, 0].append({"what": "failed", "at": 13.0, "why": "PeerLost: somebody"})


def nobody_has_ended(logs: Logs) -> None:
    for log in logs.values():
        del log[-1]


BROKEN = {
    hash_of_one_differs: ("mismatches", "fragment 0, launch of step 8"),
    one_has_refused_what_others_have_taken: ("mismatches", "fragment 1, launch of step 6"),
    one_has_never_applied: ("rounds_lost", "fragment 0, launch of step 12: lost"),
    nobody_has_applied: ("rounds_lost", "fragment 1, launch of step 10: lost"),
    all_have_refused_without_a_cause: ("rounds_lost", "fragment 1, launch of step 10: lost"),
    models_differ: ("mismatches", "different models"),
    one_does_not_end: ("problems", "clusters [1] are said to be there"),
    one_has_failed: ("problems", "cluster 1, rank 0: PeerLost: somebody"),
    nobody_has_ended: ("problems", "no rank has come to the end"),
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_what_is_wrong_is_found(breaks: Any) -> None:
    logs = copy.deepcopy(sound())
    breaks(logs)
    verdict = check(logs, [])
    what, said = BROKEN[breaks]
    assert getattr(verdict, what) and not verdict.is_good
    assert any(said in problem for problem in verdict.problems), verdict.problems


def test_a_contribution_that_was_spoilt_on_purpose_is_no_round_that_is_lost() -> None:
    logs = sound()
    for log in logs.values():
        the(log, "commit", fragment=1, step=10).update(what="refused", by=[2])
    verdict = check(logs, [])
    assert (verdict.rounds, verdict.rounds_refused, verdict.rounds_lost) == (5, 1, 0)


def test_what_a_process_has_read_and_not_committed_is_lost_unless_it_is_read_again() -> None:
    logs = after_a_loss()
    assert check(logs, []).samples_lost == 2
    for rank in range(2):  # the first process was at step 6, and committed 4; the second one reads
        the(logs[1, rank], "step", step=9)["samples"] = [5 * 3 + 1]
        the(logs[1, rank], "step", step=10)["samples"] = [6 * 3 + 1]
    verdict = check(logs, [])
    assert (verdict.samples_lost, verdict.samples_twice) == (0, 0) and verdict.is_good
    for rank in range(2):
        the(logs[1, rank], "step", step=11)["samples"] = [4 * 3 + 1]
    verdict = check(logs, [])
    assert (verdict.samples_lost, verdict.samples_twice) == (0, 1) and not verdict.is_good


def test_samples_that_two_have_read() -> None:
    logs = sound()
    the(logs[0, 0], "step", step=3)["samples"] = [3 * 3 + 1]
    assert check(logs, []).samples_twice == 1


def test_pauses_are_of_those_whom_a_fault_did_not_befall() -> None:
    logs = sound()
    the(logs[0, 0], "step", step=6)["seconds"] = 1.75
    the(logs[2, 0], "step", step=6)["seconds"] = 100.0
    windows = [Window("pause", 2, 5.5, 6.5), Window("reset", 0, 8.5, 9.5)]
    verdict = check(logs, windows)
    assert verdict.events == {"pause": 1, "reset": 1}
    assert verdict.pause_max_seconds == 1.25
    assert verdict.pause_median_seconds == 0.625


def test_a_log_is_read_by_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    tail.look()
    file.write_text('{"what": "step", "step": 3}\n{"what": "en')
    tail.look()
    assert tail.step == 3 and not tail.has("end")
    with file.open("a") as more:
        more.write('d"}\n')
    tail.look()
    assert tail.has("end") and len(tail.records) == 2


def test_orders_come_to_a_cluster_and_spoil_one_contribution(tmp_path: Path) -> None:
    orders = Orders(orders_path(tmp_path, 1), last_step=100)
    give_orders(tmp_path, 1, too_large=7)
    give_orders(tmp_path, 1, last_step=50)
    orders.look()
    assert orders.given["last_step"] == 50
    assert [orders.spoils(step) for step in (6, 7, 8)] == [None, 1e6, 1e6]
    orders.has_launched(8)
    assert orders.spoils(9) is None


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["bench", "chaos", *arguments])
        assert done.exit_code == 2
        return done.output

    assert "--kinds='fire' is not known; allowed: 'kill_rank'" in said("--kinds", "fire")
    assert "--preset='fast' is not known" in said("--preset", "fast")
    assert "--engine='jax' is not known; allowed: 'torch'" in said("--engine", "jax")
    assert f"--out {tmp_path} is there already" in said("--out", str(tmp_path))
    assert "--longest-pause" in said("--longest-pause", "9")


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(str(tmp_path), "recommended", 2, 2, ["a=h:1", "b=h:2"], [1, 2], ["k", "l"], 9, 0.1,
              8.0, 0)  # fmt: skip
    job.write()
    assert Job.read(tmp_path) == job
    assert job.dsx(1)["dsx"]["clusters"]["cluster_id"] == 1
    assert "compression" not in job.dsx(1)["dsx"]  # it has codes of its own


def after_a_loss(num_clusters: int = 3) -> Logs:
    """The cluster that was lost in step 6 is started again, and comes in at step 9."""
    logs, whole = sound(num_clusters, lost=1), sound(num_clusters)
    for rank in range(2):
        logs[1, rank].append({"what": "failed", "at": 6.5, "why": "PeerLost: as it was killed"})
        logs[1, rank].append({"what": "begin", "at": 7.0})
        logs[1, rank] += [r for r in whole[1, rank] if r["what"] != "begin" and r["step"] >= 9]
    for log in logs.values():
        for record in log:
            if record["what"] == "end" or (record["what"] == "commit" and record["step"] >= 9):
                record["members"] = [0, 1, 2]
    return logs


def test_one_that_comes_back_is_judged_by_what_it_does_since() -> None:
    verdict = check(after_a_loss(), [Window("kill_cluster", 1, 6.0, 8.0)])
    assert (verdict.rounds, verdict.rounds_lost, verdict.mismatches) == (6, 0, 0)
    assert verdict.joins == 1 and verdict.problems == []
    logs = after_a_loss()
    logs[1, 0].append({"what": "failed", "at": 13.0, "why": "PeerLost: somebody"})
    assert check(logs, []).problems == ["cluster 1, rank 0: PeerLost: somebody"]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return what a run has come to, in which nobody has got stuck."""
    file = folder / "chaos.json"
    words = ["--json", str(file), "--out", str(folder / "run"), "--longest-pause", "1"]
    done = CliRunner().invoke(app, ["bench", "chaos", *words, *arguments])
    assert file.exists(), done.output
    print(done.stdout)
    return json.loads(file.read_text())


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_forty_faults(tmp_path: Path) -> None:
    """Every round is there, and all hold the same; two of four clusters are lost on the way."""
    kinds = ",".join(kind for kind in KINDS if kind != "garble")  # which may cost a cluster yet
    words = ["--preset", "recommended", "--events", "40", "--seed", "1", "--kinds", kinds]
    found = run(tmp_path, *words, "--no-comes-back")
    assert found["problems"] == [] and sum(found["events"].values()) == 40
    assert (found["mismatches"], found["rounds_lost"]) == (0, 0)
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)  # others take up theirs
    assert sum(found["events"].get(kind, 0) for kind in LOSSES) == 2
    assert found["rounds"] > 60 and found["rounds_refused"] > 0
    assert found["loss"] < 2 * found["loss_undisturbed"]


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_clusters_are_killed_and_come_back(tmp_path: Path) -> None:
    kinds = "kill_rank,kill_leader,reset"
    found = run(tmp_path, "--events", "5", "--seed", "3", "--kinds", kinds, "--no-undisturbed")
    assert found["problems"] == []
    assert (found["mismatches"], found["rounds_lost"]) == (0, 0)
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)
    killed = sum(found["events"].get(kind, 0) for kind in LOSSES)
    assert found["joins"] == killed > 1
