"""What people are told of, and that one of all clusters tells it."""

from __future__ import annotations

from typing import Any

import pytest

from dsx.core.membership import Member, Membership
from dsx.telemetry.notices.happenings import Happenings
from dsx.telemetry.notices.notice import Notice

ALARMS = {"gain": "the outer step is too long; lower the rate"}


def membership(*ids: int, left: tuple[int, ...] = ()) -> Membership:
    return Membership(1, tuple(Member(id) for id in ids), tuple(range(8)), left)


class Run:
    """Happenings of all clusters of a run."""

    def __init__(self, *ids: int) -> None:
        self.got: list[Notice] = []
        self.losses: dict[int, float] = {}
        self.clusters = {id: self.joins(id, ids) for id in ids}

    def joins(self, id: int, members: tuple[int, ...]) -> Happenings:
        tells = [self.got.append]
        return Happenings(id, members, "r", "h", tells, ALARMS, lambda: self.losses.get(id))

    def all(self, name: str, *args: Any) -> list[tuple[str, int, tuple[int, ...], str]]:
        """Have all clusters see the same; return what was told of it."""
        del self.got[:]
        for one in self.clusters.values():
            getattr(one, name)(*args)
        return [(n.kind, n.cluster, n.clusters, n.text) for n in self.got]


def record(**more: Any) -> dict[str, Any]:
    return {"fragment": 2, "launched_step": 40, **more}


def test_one_cluster_tells_who_is_lost_and_who_is_back() -> None:
    run = Run(*range(8))
    assert run.all("step", 1, membership(*range(8))) == []
    gone = run.clusters.pop(0), run.clusters.pop(5)
    assert run.all("step", 2, membership(1, 2, 3, 4, 6, 7)) == [
        ("lost", 1, (0, 5), "cluster 0, cluster 5 are lost: 6 of 8 train on at step 2")
    ]
    run.clusters[0] = run.joins(0, (0, 1, 2, 3, 4, 6, 7))  # a new process
    assert run.all("step", 3, membership(0, 1, 2, 3, 4, 6, 7)) == [
        ("back", 1, (0,), "cluster 0 is back: 7 of 8 train on at step 3")
    ]
    run.clusters.pop(7)
    assert run.all("step", 4, membership(0, 1, 2, 3, 4, 6, left=(7,))) == [
        ("lost", 0, (7,), "cluster 7 has left in order: 6 of 8 train on at step 4")
    ]
    assert gone


def test_a_cluster_that_stands_still_tells_for_whom_it_waits_and_that_it_goes_on() -> None:
    run = Run(0, 1)
    run.all("step", 1, membership(0, 1))
    del run.clusters[0]
    assert run.all("waits", 1, (0,), 600.0) == [
        ("lost", 1, (0,), "cluster 0 is lost, and cluster 1 cannot go on alone: it has saved at "
         "step 1, and waits for up to 10 min")
    ]  # fmt: skip
    assert run.all("step", 2, membership(0, 1)) == [
        ("back", 1, (0,), "cluster 0 is reached again: training goes on")
    ]
    assert run.all("step", 3, membership(0, 1)) == []


def test_whom_a_cluster_has_waited_for_is_not_lost_once_more() -> None:
    run = Run(0, 1, 2, 3)
    del run.clusters[0], run.clusters[1]
    (told,) = run.all("waits", 1, (0, 1), 600.0)  # one of the two that wait
    assert told[:3] == ("lost", 2, (0, 1))
    assert run.all("step", 2, membership(2, 3)) == [
        ("lost", 2, (0, 1), "training goes on without cluster 0, cluster 1: 2 of 8 train on at "
         "step 2")
    ]  # fmt: skip
    assert run.all("step", 3, membership(2, 3)) == []
    assert run.all("step", 4, membership(0, 2, 3)) == [
        ("back", 2, (0,), "cluster 0 is back: 3 of 8 train on at step 4")
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [("refused_by", "was not finite, or far larger"), ("differed_in", "not, to the bit, the one"),
     ("uncommitted_by", "came to another mean")],
)  # fmt: skip
def test_who_was_left_out_and_why_is_told_less_and_less_often(key: str, words: str) -> None:
    run, told = Run(0, 1, 2), []
    for _ in range(20):
        told += run.all("sync", record(**{key: [1]}))
    assert {(kind, by, clusters) for kind, by, clusters, _ in told} == {("left_out", 0, (1,))}
    first, *_, last = [text for *_, text in told]
    assert first.startswith(
        "cluster 1 was left out of a round of fragment 2, launched at step 40: "
    )
    assert words in first and last.endswith("(the same 16 times by now)") and len(told) == 5
    assert len(run.all("sync", record(stage=3, **{key: [2]}))) == 1  # another one is news


def test_what_diverges_is_told() -> None:
    run = Run(0, 1)
    assert run.all("sync", record(guard_alarms=["gain"])) == [
        ("diverging", 0, (0, 1), "the guard's alarm 'gain' in a round of fragment 2, launched at "
         "step 40: the outer step is too long; lower the rate")
    ]  # fmt: skip
    assert run.all("sync", record(idle_in=[1])) == []  # as of one that has just come back
    (told,) = run.all("sync", record(idle_in=[1]))
    assert told[:3] == ("diverging", 0, (1,)) and "the optimizer skips them" in told[3]
    (told,) = run.all("rolled_back", "its loss is 9", 70)
    assert told[0] == "diverging" and told[3].endswith("from step 70: its loss is 9")
    run.losses = {0: 2.0, 1: float("nan")}
    assert run.all("step", 71, membership(0, 1)) == [
        ("diverging", 1, (1,), "the loss of cluster 1 is nan at step 71")  # by itself, and once
    ]
    assert run.all("step", 72, membership(0, 1)) == []
    run.losses = {1: 2.0}
    assert run.all("step", 73, membership(0, 1)) == []
    run.losses = {1: float("inf")}
    assert len(run.all("step", 74, membership(0, 1))) == 1


def test_an_end_of_all_is_told_by_one_and_an_own_one_by_each() -> None:
    run = Run(0, 1)
    assert run.all("end", 9, "finished", False) == [("finished", 0, (0, 1), "finished at step 9")]
    assert run.all("end", 9, "closed without finish()", False) == []  # it is over
    assert run.all("step", 10, membership(0, 1)) == []
    assert run.all("end", 10, "ParityError: b", False) == [
        ("ended", 0, (0, 1), "training has ended at step 10: ParityError: b")
    ]
    run.all("step", 11, membership(0, 1))
    told = run.all("end", 11, "PeerLost: c", True)
    assert [(by, clusters) for _, by, clusters, _ in told] == [(0, (0,)), (1, (1,))]
    assert told[1][3] == "cluster 1 has ended at step 11: PeerLost: c"


def test_nothing_is_looked_at_where_nobody_is_told() -> None:
    one = Happenings(0, (0, 1), "r", "h", [], {}, lambda: pytest.fail("asked for a loss"))
    one.step(1, membership(0))
    one.sync({})
    one.end(1, "finished", False)
