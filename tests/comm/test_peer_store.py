"""Connections that are found over others: what peers set, and how often a store is asked."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.comm.gloo_groups import GlooConnections, open_device
from dsx.comm.in_cluster import InCluster
from dsx.comm.peer_store import PeerStore
from dsx.core.membership import Seat

DEADLINE = timedelta(seconds=20)


class Counting(dist.Store):
    """A store that counts what it is asked; for all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()

    def _count(self, verb: str) -> None:
        with self._lock:
            self.asked[verb] += 1

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get")
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get")
        return [self._store.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta = DEADLINE) -> None:
        self._count("wait")
        self._store.wait(keys, timeout)


def connected(num_clusters: int, num_fragments: int) -> tuple[list[list[Any]], int]:
    """The groups of each cluster, and how much the store was asked for them."""
    store = Counting()

    def connect(position: int) -> list[Any]:
        seat, device = Seat.of(position, num_clusters), open_device("lo")
        made = GlooConnections(store, seat, DEADLINE, device, 1 + num_fragments)
        return [made.connect(f"part {k}", 1)[0] for k in range(1 + num_fragments)]

    with ThreadPoolExecutor(num_clusters) as threads:
        groups = list(threads.map(connect, range(num_clusters)))
    return groups, sum(store.asked.values())


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_later_groups_ask_no_store_and_reach_the_same_peers(
    lazy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connected when they are made, also where gloo is told to wait until they are used."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    _, few = connected(3, 1)
    groups, many = connected(3, 5)
    assert many == few  # however many fragments there are
    for k in range(6):
        words = [torch.full((2,), 10.0 * k + m) for m in range(3)]
        places = [[torch.zeros(2) for _ in range(3)] for _ in range(3)]
        works = [
            work
            for m in range(3)
            for peer in range(3)
            if peer != m
            for work in (
                groups[m][k].recv([places[m][peer]], peer, 7),
                groups[m][k].send([words[m]], peer, 7),
            )
        ]
        for work in works:
            work.wait(DEADLINE)
        for m in range(3):
            for peer in {0, 1, 2} - {m}:
                assert places[m][peer].tolist() == words[peer].tolist()


def test_a_key_that_nobody_has_set_is_named() -> None:
    asked: list[dict[str, str]] = []

    def exchange(own: dict[str, str]) -> list[dict[str, str]]:
        asked.append(own)
        return [own, {"theirs": b"\x01\xff".hex()}]

    store = PeerStore(exchange)
    store.set("mine", b"\x00a")
    assert not store.check(["theirs"]) and not asked
    assert (store.get("theirs"), store.get("mine")) == (b"\x01\xff", b"\x00a")
    assert asked == [{"mine": "0061"}]
    with pytest.raises(RuntimeError, match="no peer has set other"):
        store.wait(["theirs", "other"])
    assert len(asked) == 1  # nothing was set since: peers would not take part


def test_what_ranks_of_a_cluster_ask_of_their_store_grows_with_their_number_alone() -> None:
    """Not with its square, as where each is connected with each."""

    def asked(num_ranks: int) -> float:
        store = Counting()

        def make(rank: int) -> list[Any]:
            ranks = InCluster(0, rank, num_ranks, store, 20.0, 20.0)
            before = sum(store.asked.values())
            told = ranks.gather("ranks", rank)
            assert ranks.any("the last", rank == num_ranks - 1)
            assert ranks.from_first("who", rank) == 0
            assert told == list(range(num_ranks))
            assert sum(store.asked.values()) >= before
            return told

        with ThreadPoolExecutor(num_ranks) as threads:
            list(threads.map(make, range(num_ranks)))
        return sum(store.asked.values()) / num_ranks

    few, many = asked(4), asked(16)
    assert many < 2 * few


def test_a_store_is_asked_for_nothing_once_ranks_are_connected() -> None:
    stores = [Counting(), Counting()]
    shared = dist.HashStore()
    for store in stores:
        store._store = shared  # one place, counted by rank
    done = threading.Barrier(2)

    def work(rank: int) -> int:
        ranks = InCluster(0, rank, 2, stores[rank], 20.0, 20.0)
        done.wait()
        before = sum(stores[rank].asked.values())
        for _ in range(3):
            ranks.gather("ranks", "x" * 1000 * (1 + rank))
            ranks.any("one", rank == 0)
            ranks.from_first("first", {"a": rank})
        return sum(stores[rank].asked.values()) - before

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [0, 0]
