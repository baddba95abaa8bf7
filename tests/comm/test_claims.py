"""A cluster's id belongs to the first process that claims it, while it lives."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsx
from dsx.comm import claims
from dsx.comm.claims import claim
from dsx.comm.cluster_world import collective_limit
from dsx.comm.forked_children import end_workers_with_parent
from dsx.comm.meet import meet, refuse_second_host
from dsx.comm.store import open_store
from dsx.comm.topology import LauncherEnvironment, RankInfo
from tests.distributed import free_port, run_distributed


def claimed_by(pid: int, **place: str) -> dist.Store:
    store = dist.HashStore()
    other = {"nonce": "theirs", "pid": pid, **claims._place(pid), **place}
    store.set("claim/0", json.dumps(other))
    return store


def test_a_process_that_is_alive_keeps_its_id() -> None:
    store = claimed_by(os.getppid(), host="site-a")
    with pytest.raises(ValueError, match=rf"cluster 0 is taken by process {os.getppid()} on site-"):
        claim(store, store, 0, "ours")
    claim(store, store, 1, "ours")  # another id
    assert json.loads(store.get("claim/1"))["pid"] == os.getpid()


def test_one_that_is_dead_is_in_nobodys_way() -> None:
    for store in (claimed_by(2**22 + 1), claimed_by(os.getppid(), started="1")):  # gone, or reused
        claim(store, store, 0, "ours")
        assert json.loads(store.get("claim/0"))["nonce"] == "ours"
        claim(store, store, 0, "the next run of this process")


def test_on_another_machine_its_count_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_WATCH_SECONDS", 0.5)
    store, is_over = claimed_by(7, machine="another"), threading.Event()

    def beat() -> None:
        while not is_over.wait(0.05):
            store.add("beat/theirs", 1)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(ValueError, match="cluster 0 is taken by process 7"):
        claim(store, store, 0, "ours")
    is_over.set()
    thread.join()
    claim(store, store, 0, "ours")
    before = store.add("beat/ours", 0)
    until = time.monotonic() + 10
    while store.add("beat/ours", 0) == before and time.monotonic() < until:
        time.sleep(0.05)
    assert store.add("beat/ours", 0) > before  # this one's count goes up


kept: list[dist.Store] = []  # until the process ends: the others need its host


def meet_twice() -> str:
    """Two processes are cluster 0, at the same time; one is cluster 1."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = open_store("127.0.0.1", port, is_host=rank == 0, deadline_seconds=20)
    kept.append(store)
    try:
        session = meet(store, RankInfo(rank // 2, 2, 0, 1), 20)
    except ValueError as error:
        return str(error)
    try:
        refuse_second_host("127.0.0.1", port)
        return session
    except ValueError as error:  # who would host the store is told, too, unless it is cluster 0
        return session + (" and its host" if "cluster 0 is taken" in str(error) else "")


@pytest.mark.ci
def test_of_two_processes_that_claim_an_id_one_is_refused() -> None:
    *twins, other = run_distributed(meet_twice, 3)
    refused = [text for text in twins if text.startswith("cluster 0 is taken by process")]
    assert len(refused) == 1 and "two launchers have cluster_id 0" in refused[0]
    assert other == next(text for text in twins if text not in refused) + " and its host"


def test_clusters_that_count_others_are_refused_by_name() -> None:
    port = free_port()
    host = open_store("127.0.0.1", port, is_host=True, deadline_seconds=5)
    joined = dist.PrefixStore("dsx/join", host)
    pid = os.getppid()
    joined.set("claim/0", json.dumps({"nonce": "theirs", "pid": pid, **claims._place(pid)}))
    joined.set("here/0", json.dumps({"nonce": "theirs", "num_clusters": 2, "world_size": 1}))
    with pytest.raises(
        ValueError, match=r"this is cluster 2 of 3, but cluster 0 is one of 2, 0..1"
    ):
        meet(host, RankInfo(2, 3, 0, 1), 10)


PLACES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "2"}, r"RANK='2' in the environment with WORLD_SIZE=2 must be an integer, 0..1"),
        ({"RANK": "-1"}, "RANK='-1' in the environment"),
        ({"RANK": "first"}, "RANK='first' in the environment"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment must be an integer, at least 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK='2' in the environment must be an integer, 0..1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, r"LOCAL_RANK='1' .* 0..0"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE='3'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536' in the environment must be"),
    ],
)
def test_a_place_that_is_none_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        LauncherEnvironment.read({**PLACES, **given})
    assert LauncherEnvironment.read({**PLACES, "LOCAL_RANK": "1"}).world_size == 2


def stay(ready: Any) -> None:
    ready.set()
    signal.pause()


def test_a_forked_worker_ends_with_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    ready, reader = context.Event(), os.pipe()
    rank = os.fork()
    if rank == 0:
        end_workers_with_parent()
        worker = context.Process(target=stay, args=(ready,))
        worker.start()
        os.write(reader[1], str(worker.pid).encode())
        signal.pause()
        os._exit(0)
    try:
        assert ready.wait(20)
        worker = int(os.read(reader[0], 20))
    finally:
        os.kill(rank, 9)
        os.waitpid(rank, 0)
    until = time.monotonic() + 20  # it would sleep for a minute
    while time.monotonic() < until and claims._place(worker)["started"] != "-":
        time.sleep(0.02)
    assert claims._place(worker)["started"] == "-"


def start_again() -> list[tuple[int, int]]:
    """Two starts of both ranks at one store, as `torchrun --max-restarts` makes them."""
    if os.environ["RANK"] == "0":
        port = int(os.environ["MASTER_PORT"]) + 1
        kept.append(open_store("127.0.0.1", port, is_host=True, deadline_seconds=20))
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1),
    }
    sums: list[tuple[int, int]] = []
    for start in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
        clusters = {"num_clusters": 1, "join_deadline_seconds": 20}
        world = dsx.init_distributed({"dsx": {"preset": "diloco", "clusters": clusters}})
        total = torch.tensor(1 + world.rank)
        dist.all_reduce(total)
        sums.append((start, int(total)))
        dist.destroy_process_group()
    return sums


@pytest.mark.ci
def test_ranks_start_again_at_a_store_that_stays() -> None:
    assert run_distributed(start_again, 2) == [[(0, 3), (1, 3)]] * 2


@pytest.mark.parametrize("minutes", ["soon", "0", "-3", "1e3"])
def test_deepspeeds_limit_is_read_before_anything_waits(
    minutes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(ValueError, match=f"DEEPSPEED_TIMEOUT='{minutes}' in the environment must"):
        collective_limit()
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "7")
    assert collective_limit().total_seconds() == 420


def test_one_that_was_taken_for_dead_is_told_so() -> None:
    store = dist.HashStore()
    require_held = claim(store, store, 0, "ours")
    require_held()
    other = {"nonce": "theirs", "pid": os.getppid(), **claims._place(os.getppid())}
    store.set("claim/0", json.dumps(other))
    with pytest.raises(ValueError, match=rf"cluster 0 is taken by process {os.getppid()} on"):
        require_held()


ENDS_WHILE_WAITING = """
import sys, threading, time
import torch.distributed as dist
from dsx.comm.claims import claim

class Far:
    def add(self, key, amount):
        asked.set()
        time.sleep(0.3)
        print("answered", flush=True)

asked = threading.Event()
claim(dist.HashStore(), Far(), 0, "ours")
asked.wait()
"""


@pytest.mark.ci
def test_a_process_ends_once_the_store_has_answered_its_last_sign_of_life() -> None:
    """On a long line: a thread that goes on in an interpreter that has ended would abort it."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_WAITING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "answered\n"), done.stderr
