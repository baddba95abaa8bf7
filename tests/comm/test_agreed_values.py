"""Values of clusters of several ranks: the first ones ask where clusters meet, for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm.rendezvous import Rendezvous
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from tests.comm.test_rendezvous import together

CLUSTERS, RANKS = 3, 4


class Counted(dist.Store):
    """A store, and the keys that it has been asked for, a text for each request."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self.asked = store, list[str]()

    def set(self, key: str, value: Any) -> None:
        self.asked.append(key)
        self._store.set(key, value.decode() if isinstance(value, bytes) else value)

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self.asked.append(key)
        return self._store.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        self.asked.append(" ".join(keys))
        self._store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.append(" ".join(keys))
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.asked.append(" ".join(keys))
        for key, value in zip(keys, values, strict=True):
            self._store.set(key, value.decode() if isinstance(value, bytes) else value)

    def check(self, keys: list[str]) -> bool:
        self.asked.append(" ".join(keys))
        return self._store.check(keys)


def everyone(
    do: Callable[[Rendezvous, int, int], Any],
    seconds: float = 20.0,
    absent: tuple[int, ...] = (),
) -> tuple[list[Any], list[list[str]]]:
    """Do it in all ranks of all clusters but some; return results and what was asked, by rank."""
    functions: list[Callable[[], Any]] = []
    counted: list[Counted] = []
    shared = dist.HashStore()
    for cluster in sorted({*range(CLUSTERS)} - {*absent}):
        own = dist.HashStore()
        for rank in range(RANKS):
            store = Counted(shared)
            counted.append(store)
            info = RankInfo(cluster, CLUSTERS, rank, RANKS)
            one = Rendezvous(store, info, "session", seconds, own)
            functions.append(lambda one=one, m=cluster, rank=rank: do(one, m, rank))
    return together(*functions), [store.asked for store in counted]


def test_only_first_ranks_ask_where_clusters_meet() -> None:
    def do(one: Rendezvous, cluster: int, rank: int) -> Any:
        return one.gather("folder", f"of {cluster}, {rank}"), one.compare("layout", ["x", rank])

    results, asked = everyone(do)
    told = [f"of {m}, 0" for m in range(CLUSTERS)]
    assert results == [
        (told, [["x", rank]] * CLUSTERS) for _ in range(CLUSTERS) for rank in range(RANKS)
    ]
    assert not any(keys for place, keys in enumerate(asked) if place % RANKS)
    assert all(len(keys) <= 2 * 5 for keys in asked)  # however many clusters


def test_where_one_rank_differs_all_get_what_those_of_their_number_have() -> None:
    def value(cluster: int, rank: int) -> Any:
        return {"sizes": [7, 9 if (cluster, rank) == (1, 2) else 8]}

    results, _ = everyone(lambda one, m, rank: one.compare("layout", value(m, rank)))
    assert results == [
        [value(m, rank) for m in range(CLUSTERS)] for _ in range(CLUSTERS) for rank in range(RANKS)
    ]


@pytest.mark.parametrize("call", ["gather", "compare"])
def test_a_cluster_that_does_not_answer_is_named_on_all_ranks(call: str) -> None:
    results, _ = everyone(
        lambda one, m, rank: getattr(one, call)("layout", 3), seconds=1.0, absent=(1,)
    )
    assert len(results) == 2 * RANKS
    assert all(isinstance(result, PeerLost) for result in results), results
    assert {str(result) for result in results} == {
        "layout: cluster 1 did not answer within 1 s (clusters.deadline_seconds)"
    }


def test_a_rank_that_does_not_come_is_waited_for_by_its_own_cluster() -> None:
    def do(one: Rendezvous, cluster: int, rank: int) -> Any:
        if (cluster, rank) == (0, 3):
            return None
        return one.compare("layout", json.dumps([rank]))

    results, _ = everyone(do, seconds=1.0)
    said = (
        "layout: cluster 0 waits for its rank(s) 3, which did not answer within 1 s "
        "(clusters.deadline_seconds)"
    )
    assert [*map(str, results[:3])] == [said] * 3 and results[3] is None
    others = {str(r) for r in results[4:] if isinstance(r, PeerLost)}
    assert len(results[4:]) == 8 and others == {
        "layout: cluster 0 did not answer within 1 s (clusters.deadline_seconds)"
    }
