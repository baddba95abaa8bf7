"""Meeting at a store: liveness, stale keys of earlier runs, deadlines, mismatches."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm.address import parse_address
from dsx.comm.meet import meet
from dsx.comm.rendezvous import Recorded, Rendezvous
from dsx.comm.store import open_store
from dsx.comm.topology import LauncherEnvironment, RankInfo, split_world
from dsx.core.transport import PeerLost
from tests.distributed import free_port


@pytest.fixture
def port() -> Any:
    number = free_port()
    store = open_store("127.0.0.1", number, is_host=True, deadline_seconds=5)
    yield number
    del store


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread; an exception is its result."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def client(port: int) -> dist.Store:
    return open_store("127.0.0.1", port, is_host=False, deadline_seconds=5)


def join(port: int, cluster: int, num_clusters: int = 2, size: int = 1) -> Callable[[], str]:
    rank_info = RankInfo(cluster, num_clusters, 0, size)
    return lambda: meet(client(port), rank_info, 3)


def test_all_clusters_get_one_session_and_every_run_a_new_one(port: int) -> None:
    first = together(*(join(port, m, 3) for m in range(3)))
    second = together(*(join(port, m, 3) for m in range(3)))
    assert len(set(first)) == 1 and len(set(second)) == 1
    assert first[0] != second[0]


def test_keys_of_a_dead_cluster_are_not_taken_for_a_peer(port: int) -> None:
    together(join(port, 0), join(port, 1))  # an earlier run left its hellos in the store
    error = together(join(port, 0))[0]
    assert isinstance(error, PeerLost)
    assert "cluster 1 of 2 did not come within 3 s" in str(error)
    late = together(join(port, 0), join(port, 1))  # and the store still serves the next try
    assert late[0] == late[1]


@pytest.mark.parametrize(
    ("clusters", "said"),
    [(((0, 2, 1), (1, 3, 1)), "clusters.num_clusters"), (((0, 2, 1), (1, 2, 4)), "ranks 1")],
)
def test_clusters_of_different_number_or_size_are_refused(
    port: int, clusters: Any, said: str
) -> None:
    errors = together(*(join(port, *c) for c in clusters))
    assert all(isinstance(e, ValueError) for e in errors), errors
    assert said in str(errors[0])


def test_a_cluster_that_is_started_again_while_the_others_still_meet_is_waited_for(
    port: int,
) -> None:
    def come(cluster: int, seconds: float = 20) -> str:
        return meet(client(port), RankInfo(cluster, 3, 0, 1), seconds)

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(come, 0)
        with pytest.raises(PeerLost, match="cluster 2 of 3 did not come"):
            come(1, 3)  # by when the first one has come, however busy the machine is
        again = threads.submit(come, 1)
        time.sleep(0.5)
        sessions = {each.result(20) for each in (first, again, threads.submit(come, 2))}
    assert len(sessions) == 1


def test_gather_and_compare(port: int) -> None:
    def work(cluster: int) -> Callable[[], Any]:
        rendezvous = Rendezvous(client(port), RankInfo(cluster, 2, 0, 1), "s", 5)
        return lambda: (
            rendezvous.gather("losses", {"loss": cluster + 0.5}),
            rendezvous.compare("layout", ["a" * 5000, cluster]),
        )

    for gathered, compared in together(work(0), work(1)):
        assert gathered == [{"loss": 0.5}, {"loss": 1.5}]
        assert compared == [["a" * 5000, 0], ["a" * 5000, 1]]


def test_a_missing_answer_names_the_cluster(port: int) -> None:
    rendezvous = Rendezvous(client(port), RankInfo(0, 2, 0, 1), "alone", 1)
    with pytest.raises(PeerLost, match=r"losses: cluster 1 did not answer within 1 s"):
        rendezvous.gather("losses", 1)


def test_nobody_listens() -> None:
    with pytest.raises(PeerLost, match=r"no rendezvous store answered at 127.0.0.1:\d+ within 1 s"):
        open_store("127.0.0.1", free_port(), is_host=False, deadline_seconds=1)


def test_a_taken_port_says_so(port: int) -> None:
    with pytest.raises(RuntimeError, match=rf"cannot listen on 127.0.0.1:{port}"):
        open_store("127.0.0.1", port, is_host=True, deadline_seconds=1)


@pytest.mark.parametrize(
    "bad", ["10.0.0.1:29400", "tcp://host", "tcp://host:port", "udp://a:1", ""]
)
def test_a_bad_address_says_what_is_allowed(bad: str) -> None:
    with pytest.raises(ValueError, match=r"must be 'env://' .* or 'tcp://host:port'"):
        parse_address(bad)


def test_address() -> None:
    assert parse_address("tcp://site-a.example:29400") == ("site-a.example", 29400)


def test_ranks_split_into_contiguous_clusters() -> None:
    places = [split_world(rank, 6, 3) for rank in range(6)]
    assert [(p.cluster_id, p.rank, p.world_size) for p in places] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 2), (2, 1, 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="does not divide the launcher's 5 ranks"):
        split_world(0, 5, 2)


def test_a_missing_launcher_is_named() -> None:
    with pytest.raises(RuntimeError, match="no rendezvous: WORLD_SIZE, MASTER_PORT not set"):
        LauncherEnvironment.read({"RANK": "0", "MASTER_ADDR": "localhost"})
    read = LauncherEnvironment.read(
        json.loads('{"RANK":"1","WORLD_SIZE":"2","MASTER_ADDR":"h","MASTER_PORT":"9"}')
    )
    assert (read.rank, read.world_size, read.store_is_hosted) == (1, 2, False)


def test_who_waits_for_a_store_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dsx.comm.store._SILENT_SECONDS", 0.2)
    port = free_port()
    with caplog.at_level(logging.WARNING), pytest.raises(PeerLost):
        open_store("127.0.0.1", port, is_host=False, deadline_seconds=1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"waiting for the rendezvous store at 127.0.0.1:{port}, up to 1 s")


def test_who_joins_compares_with_what_was_told_and_passes_over_what_is_not_its_own() -> None:
    told: list[tuple[str, list[Any]]] = [
        ("layout", [1, 1]), ("resume point", [3, 3]), ("resume point", [[3], [3]]), ("data", [5, 5])
    ]  # fmt: skip
    rendezvous = Recorded(dist.HashStore(), RankInfo(1, 2, 0, 1), "s", 1.0, told)
    assert rendezvous.gather("layout", 2) == [1, 2]
    rendezvous.skip(["resume point"])
    with pytest.raises(ValueError, match=r"other: the clusters of the run .*\('data' is due\)"):
        rendezvous.gather("other", 0)
    assert rendezvous.compare("data", 6) == [5, 6]
    assert [name for name, _ in rendezvous.records] == [name for name, _ in told]
    rendezvous.skip(["data"])
    with pytest.raises(ValueError, match="nothing more was compared"):
        rendezvous.gather("data", 0)
