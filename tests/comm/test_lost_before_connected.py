"""A peer that says where it is, and is lost before it connects, is waited for by the deadline."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.core.membership import Seat
from tests.comm.test_rendezvous import together

DEADLINE = timedelta(seconds=1.5)


class Remembered(dist.Store):
    """A store that still has what was set in another one, from the beginning on."""

    def __init__(self, before: dict[str, Any]) -> None:
        super().__init__()
        self._store, self.values = dist.HashStore(), dict[str, Any]()
        for key, value in before.items():
            self.set(key, value)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = DEADLINE) -> None:  # type: ignore[override]
        self._store.wait(keys, timeout)


def connected(store: dist.Store) -> list[Any]:
    """Return the groups of two peers, or why they have none."""

    def connect(position: int) -> Any:
        device = open_device("lo")
        device.address = ""  # nobody calls it before gloo does
        return connect_gloo(store, Seat.of(position, 2), DEADLINE, device)[0]

    return together(lambda: connect(0), lambda: connect(1))


@pytest.mark.parametrize("lost", [0, 1])
def test_one_lost_between_its_address_and_its_connection_is_waited_for_once(lost: int) -> None:
    """gloo calls it five times, and would wait five deadlines."""
    first = Remembered({})
    groups = connected(first)
    sent = [torch.arange(3.0), torch.zeros(3)]
    work = groups[1].recv([sent[1]], 0, 1)
    groups[0].send([sent[0]], 1, 1).wait(DEADLINE)
    work.wait(DEADLINE)
    assert sent[1].tolist() == [0, 1, 2]
    del groups, work  # its ports are closed
    of_lost = (f"/{lost}", f"place/{lost}", f"reached/{lost}", f"listens/{lost}")
    store = Remembered({k: v for k, v in first.values.items() if k.endswith(of_lost)})
    device = open_device("lo")
    device.address = ""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out|refused"):
        connect_gloo(store, Seat.of(1 - lost, 2), DEADLINE, device)
    assert time.monotonic() - began < 2 * DEADLINE.total_seconds()
