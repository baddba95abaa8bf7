"""Where a cluster that heals takes things from: how long it waits for what is not there yet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from dsx.core.transport import PeerLost
from dsx.outer.donor import DATA, FIRST, WAIT
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
