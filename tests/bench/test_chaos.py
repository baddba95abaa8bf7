"""`dsx bench chaos`: its faults, what its ranks are told and write, and runs of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.bench.chaos.disks import APART, Disks, may_mount
from dsx.bench.chaos.faults import (
    ENDS,
    KINDS,
    LOSSES,
    comes_back_at_once,
    draw,
    require_possible,
)
from dsx.bench.chaos.job import PLANS, PRESETS, Job, checkpoints_path, give_orders, orders_path
from dsx.bench.chaos.logs import Tail, note_exit
from dsx.bench.chaos.saves import Saves, steps_of_ends
from dsx.bench.chaos.worker import FaultOrders
from dsx.cli import app
from dsx.config.schema import load_config
from dsx.core.types import History, Stage, SyncParams


def test_faults_follow_from_the_seed_and_leave_two_clusters() -> None:
    kinds = [kind for kind in KINDS if kind != "join"]
    drawn = draw(3, 200, 5, 2, kinds)
    assert drawn == draw(3, 200, 5, 2, kinds) != draw(4, 200, 5, 2, kinds)
    assert {fault.kind for fault in drawn} - ENDS == {*kinds} - ENDS
    lost: list[int] = []
    for fault in drawn:
        assert fault.cluster not in lost and 0 <= fault.rank < 2
        if fault.kind in ENDS:
            lost.append(fault.cluster)
    assert len(lost) == 3
    assert len(draw(0, 50, 4, 2, ["kill_leader"])) == 2


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("num_clusters", [3, 4, 7])
def test_who_leaves_may_join_later_and_two_are_always_there(
    num_clusters: int, comes_back: bool
) -> None:
    there, drawn = {*range(num_clusters)}, draw(1, 300, num_clusters, 2, comes_back=comes_back)
    assert len(drawn) == 300 and {fault.kind for fault in drawn} == {*KINDS}
    for fault in drawn:
        assert (fault.cluster in there) == (fault.kind != "join")
        if fault.kind == "join":
            there.add(fault.cluster)
        elif fault.kind in ENDS and not comes_back_at_once(fault.kind, KINDS, comes_back):
            there.remove(fault.cluster)
        assert len(there) >= 2
    leaves = [fault for fault in drawn if fault.kind == "leave"]
    assert {fault.by_order for fault in leaves} == {True, False}


def test_of_two_clusters_one_may_be_killed_that_comes_back() -> None:
    kinds = [kind for kind in KINDS if kind not in ("leave", "join")]
    assert any(fault.kind in LOSSES for fault in draw(0, 40, 2, 2, kinds, comes_back=True))
    assert not any(fault.kind in LOSSES for fault in draw(0, 40, 2, 2, kinds))
    require_possible(["kill_rank"], 2, comes_back=True)
    with pytest.raises(ValueError, match="of 2 clusters none may go; take --clusters 3"):
        require_possible(["kill_rank"], 2, comes_back=False)
    with pytest.raises(ValueError, match="nobody would be away to join; add leave"):
        require_possible(["join", "kill_rank", "reset"], 4, comes_back=True)
    require_possible(["join", "kill_rank"], 4, comes_back=False)


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


def test_a_log_says_how_a_process_has_ended(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    (tmp_path / "log").write_text('{"what": "failed", "why": "PeerLost: somebody"}\n')
    note_exit(tmp_path / "log", -9)
    tail.look()
    assert tail.failure == "PeerLost: somebody" and tail.records[-1]["status"] == -9
    tail.begins_anew()
    assert tail.failure is None
    note_exit(tmp_path / "log", -11)
    tail.look()
    assert tail.failure == "exit status -11"


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_due_is_that_of_the_preset(preset: str) -> None:
    """The plan is what the checker believes, and says what the method's own schedule does."""
    job = Job("/run", preset, 2, 2, ["a=h:1", "b=h:2"], [1, 2], ["k", "l"], 9, 0.1, 8.0, 0)
    schedule, plan = load_config(job.dsx(0)).method.schedule, PLANS[preset]
    history, parameters = History(3), SyncParams(interval=schedule.interval)
    due: set[tuple[int, int]] = set()
    schedule.advance(history, parameters)
    for step in range(1, 50):
        for fragment in schedule.due(step, history, parameters, Stage()):
            due.add((fragment, step))
            history.launched[fragment] = step
        history.step = step
        schedule.advance(history, parameters)
    assert due == plan.due(3, 49)


def test_a_save_that_fails_is_said_and_the_one_before_stays(tmp_path: Path) -> None:
    has_room, told = True, list[tuple[str, dict[str, Any]]]()

    def save(base: Path, tag: str) -> None:
        if not has_room:
            raise OSError("No space left on device")
        (base / "cluster_1" / tag).mkdir(parents=True)

    class Log:
        def write(self, what: str, **fields: Any) -> None:
            told.append((what, fields))

    folder = tmp_path / "cluster_1"
    saves = Saves(save, folder, True, Log())
    for step in range(1, 101):
        has_room = step != 75
        saves.save_if_due(step)
        if step == 75:
            assert [path.name for path in folder.iterdir()] == ["step_50"]
    assert [path.name for path in folder.iterdir()] == ["step_100"]
    assert told == [
        ("saved", {"step": 25}), ("saved", {"step": 50}),
        ("not_saved", {"step": 75, "why": "No space left on device"}), ("saved", {"step": 100}),
    ]  # fmt: skip
    for tag in ("preempted_step130", "preempted_step140", "step_150"):
        (folder / tag).mkdir()
    (folder / "preempted_step130" / "dsx.json").touch()
    assert steps_of_ends(folder) == [130]


@pytest.mark.ci
def test_a_disk_is_full_and_has_room_again(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("needs the right to mount a small disk")
    mount = "import sys; from pathlib import Path; from dsx.bench.chaos.disks import mount_disks; "
    mount += "mount_disks(Path(sys.argv[1]), 2); print(flush=True); sys.stdin.read()"
    words = [*APART, sys.executable, "-c", mount, str(tmp_path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        disks = Disks(process.pid, tmp_path)
        file = disks.folder(1) / "file"
        disks.fill(1)
        with pytest.raises(OSError, match="No space left on device"):
            file.write_bytes(bytes(5000))
        (disks.folder(0) / "file").write_bytes(bytes(5000))
        disks.free(1)
        file.write_bytes(bytes(5000))
    finally:
        process.kill()
        process.communicate()
    assert list(checkpoints_path(tmp_path, 1).iterdir()) == []  # gone with that process


def test_orders_come_to_a_cluster_and_spoil_one_contribution(tmp_path: Path) -> None:
    orders = FaultOrders(orders_path(tmp_path, 1), last_step=100)
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


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return what a run has come to, in which nobody has got stuck."""
    file = folder / "chaos.json"
    words = ["--json", str(file), "--out", str(folder / "run"), "--longest-pause", "1"]
    done = CliRunner().invoke(app, ["bench", "chaos", *words, *arguments])
    assert file.exists(), done.output
    print(done.stdout)
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_forty_faults(tmp_path: Path) -> None:
    """Every round is there, and all hold the same; two of four clusters go on the way."""
    left_out = ("garble", "join")  # the first may cost a cluster yet, the other one costs time
    kinds = ",".join(kind for kind in KINDS if kind not in left_out)
    words = ["--preset", "recommended", "--events", "40", "--seed", "1", "--kinds", kinds]
    found = run(tmp_path, *words, "--no-comes-back")
    assert found["problems"] == [] and sum(found["events"].values()) == 40
    assert (found["mismatches"], found["rounds_lost"]) == (0, 0)
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)  # others take up theirs
    assert sum(found["events"].get(kind, 0) for kind in ENDS) == 2
    assert found["rounds"] > 60 and found["rounds_refused"] > 0
    assert 0.95 < found["loss"] / found["loss_undisturbed"] < 1.05


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_clusters_are_killed_and_come_back(tmp_path: Path) -> None:
    kinds = "kill_rank,kill_leader,reset"
    found = run(tmp_path, "--events", "3", "--seed", "3", "--kinds", kinds, "--no-undisturbed")
    assert found["problems"] == []
    assert (found["mismatches"], found["rounds_lost"]) == (0, 0)
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)
    killed = sum(found["events"].get(kind, 0) for kind in LOSSES)
    assert found["joins"] == killed > 1


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_clusters_leave_join_and_have_full_disks(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("needs the right to mount a small disk")
    kinds = "leave,join,full_disk"
    words = ["--clusters", "3", "--events", "3", "--seed", "0", "--kinds", kinds]
    found = run(tmp_path, *words, "--no-undisturbed")
    assert found["problems"] == []
    assert (found["mismatches"], found["rounds_lost"]) == (0, 0)
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)
    assert found["joins"] == found["events"]["join"] and {*found["events"]} == {*kinds.split(",")}


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_ranks_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    words = ["--clusters", "2", "--ranks", "1", "--out", str(tmp_path / "run")]
    driver = subprocess.Popen([sys.executable, "-m", "dsx", "bench", "chaos", *words])
    try:
        wait_until(lambda: len(processes_of(tmp_path)) > 3)  # driver, nursery, and both ranks
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not processes_of(tmp_path))


def processes_of(folder: Path) -> list[str]:
    """Return what runs with a folder's name among its words."""
    found: list[str] = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder) in (words := one.read_text()) and "chaos" in words:
                found.append(words)
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 80
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.1)
