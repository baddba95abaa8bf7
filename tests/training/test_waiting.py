"""Orders to a cluster that waits for a quorum: told "done" once it has saved, and never lost."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dsx.comm.links.quorum import Waiting as Lost
from dsx.core.leaving import LOST, ORDERED, Reason
from dsx.training.orders import Orders
from dsx.training.waiting import Waiting

LEAVE = Reason(0, ORDERED, leaves=True)


class World:
    """Of a cluster of one rank, whose quorum a test has lost."""

    def __init__(self) -> None:
        self.clerk = self.quorum = self.coming = self.history = self.transport = self
        self.desk = self.stops = self
        self.seconds: Any = 0.0
        self.waiting: Lost | None = Lost({1: "it is gone"}, (0, 1), 60.0)
        self.num_handles, self.cluster_id, self.step = 1, 0, 12
        self.farewells = self.end = None
        self.verbs: dict[str, Any] = {"leave": self.leave}
        self.facts: list[Any] = []
        self.posted: list[Any] = []
        self.cluster = 0
        self.asked: list[Reason] = []
        self.left: list[Any] = []

    def leave(self, request: Any) -> dict[str, Any]:
        self.left.append(request)
        return {"reason": "dsx ctl leave"}

    @property
    def place(self) -> World:
        return self

    def ask(self, reason: Reason) -> None:
        self.asked.append(reason)

    def in_cluster(self) -> World:
        return self

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value]

    def standing_still(self, step: int, gone: tuple[int, ...], seconds: float) -> Any:
        return nullcontext()

    def post(self, kind: str, payload: Any) -> None:
        self.posted.append((kind, payload))


def made() -> tuple[World, Waiting]:
    world: Any = World()
    orders = Orders(world, world, True, 4, lambda record: None)
    orders.offer("stop")
    waiting = Waiting(
        world, world, 60.0, orders, world, world, lambda: None, lambda: True
    )  # fmt: skip
    return world, waiting


def progress(world: World, id: str) -> dict[str, Any]:
    return world.verbs["progress"]({"id": id})


@pytest.mark.parametrize("do", ["stop", "leave"])
def test_it_is_done_once_this_cluster_has_saved(do: str) -> None:
    world, waiting = made()
    answer = world.verbs[do]({"by": "oslo"})
    assert world.asked == [Reason(1, LOST)]  # so it stops, and saves
    told = progress(world, answer["id"])
    assert told == {"do": do, "by": "oslo", "state": "agreed", "step": 12}
    assert world.verbs[do]({"by": "oslo"})["id"] == answer["id"]
    expected = Reason(0, ORDERED) if do == "stop" else LEAVE
    assert waiting.wait(Path("/saved/here"), 0.5) == expected
    told = progress(world, answer["id"])
    assert told["state"] == "done" and told["path"] == "/saved/here" and told["seconds"] == 0.5
    assert not world.left and not world.posted


def test_one_that_comes_as_the_quorum_is_back_is_followed_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By all, at one step; or, to leave, by this cluster as it trains on."""
    world, waiting = made()
    gather = world.gather

    ids: list[str] = []
    for do in ("stop", "leave"):

        def late(what: str, value: Any, do: str = do) -> list[Any]:
            told = gather(what, value)
            if told == ["goes on"]:  # the ranks have agreed on it, and then somebody asks
                world.waiting = Lost({1: "it is gone"}, (0, 1), 60.0)
                ids.append(world.verbs[do]({"by": "oslo"})["id"])
                world.waiting = None
            return told

        monkeypatch.setattr(world, "gather", late)
        world.waiting = None
        assert waiting.wait(None, 0.0) is None
        assert progress(world, ids[-1])["state"] == "agreed"
    ((kind, payload),) = world.posted
    assert kind == "order" and payload[1:] == ["stop", "oslo", {}]
    assert world.left == [{"by": "oslo"}]


def test_one_given_before_the_quorum_is_back_ends_no_cluster_alone() -> None:
    """All are there again when the ranks ask each other: all stop, at one step."""
    world, waiting = made()
    id = world.verbs["stop"]({"by": "oslo"})["id"]
    world.waiting = None
    assert waiting.wait(None, 0.0) is None
    assert progress(world, id)["state"] == "agreed"
    assert world.posted == [("order", [id, "stop", "oslo", {}])]


def test_while_nobody_is_lost_an_order_is_for_all() -> None:
    world, _ = made()
    world.waiting = None
    id = world.verbs["stop"]({"by": "oslo"})["id"]
    assert world.posted == [("order", [id, "stop", "oslo", {}])] and not world.asked
    assert world.verbs["leave"]({"by": "oslo"}) == {"reason": "dsx ctl leave"}


def test_an_order_that_has_to_wait_is_refused() -> None:
    world, _ = made()
    orders_of_save = Orders(world, world, True, 4, lambda record: None)  # pyright: ignore
    Waiting(
        world, world, 60.0, orders_of_save, world, world, lambda: None, lambda: True  # pyright: ignore
    )  # fmt: skip
    orders_of_save.offer("save")
    with pytest.raises(ValueError, match=r"waits for cluster\(s\) 1, and trains no step meanwhile"):
        world.verbs["save"]({"by": "oslo"})


def test_one_that_comes_while_it_waits_ends_the_wait() -> None:
    world, waiting = made()
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(waiting.wait(None, 0.0)))
    thread.start()
    while not waiting.is_on:
        time.sleep(0.01)
    world.verbs["stop"]({"by": "oslo"})
    thread.join(30)
    assert ended == [Reason(0, ORDERED)]
