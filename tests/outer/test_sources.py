"""Where a cluster that heals takes things from: how long it waits for what is not there yet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from dsx.core.transport import PeerLost
from dsx.outer import parcel
from dsx.outer.donor import DATA, FIRST, WAIT
from dsx.outer.parcel import Parcel
from dsx.outer.sources import Rate, Sources

DEADLINE_SECONDS = 0.3


def sources_of(answer: Callable[[str], bytes]) -> Sources:
    """Return two clusters that answer alike, by the verb of a request."""

    def ask(cluster: int, body: bytes) -> Future[bytes]:
        asked: Future[bytes] = Future()
        asked.set_result(answer(json.loads(body[len(FIRST) :])[0]))
        return asked

    return Sources(ask, [1, 2], "a try", Rate(None), DEADLINE_SECONDS)


def place(step: int) -> bytes:
    return DATA + json.dumps({"step": step, "result": 3, "ids": [1, 2], "refuses": ""}).encode()


def test_what_others_who_stand_still_do_not_have_is_waited_for_by_the_deadline() -> None:
    sources = sources_of(lambda verb: place(7) if verb == "where" else WAIT)
    with pytest.raises(PeerLost, match="result of 2 cluster.*taken no step for 0.3 s"):
        sources.parcel(("result", 4), ("piece", 4))


def test_others_who_go_on_are_waited_for() -> None:
    began = time.monotonic()
    head = {"values": {"it": "came"}, "tensors": [], "slice_bytes": 1 << 18, "hashes": ""}

    def answer(verb: str) -> bytes:
        if verb == "where":
            return place(int(1000 * (time.monotonic() - began)))
        is_late = time.monotonic() > began + 4 * DEADLINE_SECONDS
        return DATA + json.dumps(head).encode() if is_late else WAIT

    opened = sources_of(answer).parcel(("result", 4), ("piece", 4))
    assert opened.values == {"it": "came"} and time.monotonic() > began + 4 * DEADLINE_SECONDS


def test_only_what_is_not_here_already_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "LEAST_SLICE_BYTES", 1 << 10)
    theirs = {"anchor": torch.randn(1000), "momentum": torch.randn(500)}
    given = Parcel({"step": 4}, theirs)
    asked: list[int] = []

    def ask(cluster: int, body: bytes) -> Future[bytes]:
        verb, _, *operands = json.loads(body[len(FIRST) :])
        if verb == "piece":
            asked.append(operands[1])
        found: Future[bytes] = Future()
        found.set_result(DATA + (given.slice(operands[1]) if verb == "piece" else given.head))
        return found

    own = {"anchor": theirs["anchor"].clone()}
    own["anchor"][300] = 7.0  # bytes 1200 to 1204: the second slice is another one
    sources = Sources(ask, [1, 2], "a try", Rate(None), DEADLINE_SECONDS)
    begun: list[tuple[int, int]] = []  # bytes in all, and slices asked for by then
    opened = sources.parcel(
        ("result", 4), ("piece", 4), own.get, lambda it: begun.append((it.num_bytes, len(asked)))
    )
    assert begun == [(4 * 1500, 0)]
    assert {name: t.tolist() for name, t in opened.tensors.items()} == {
        name: t.tolist() for name, t in theirs.items()
    }
    assert sorted(asked) == [1, 3, 4, 5] and opened.held_bytes == 2 * 1024
