"""What a line's latency costs a round over gloo, behind a relay that delays every byte."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.comm.gloo import FragmentGroups, connect_gloo, open_device
from dsx.core.exchange import to_all
from dsx.core.membership import Seat
from dsx.plan.link import ROUND_ONE_WAYS
from tests.distributed import run_distributed

LATENCY, ROUNDS = 0.05, 5
RELAY = Path(__file__).with_name("relay.py")
LOOPBACK = socket.inet_aton("127.0.0.1")


class Detour(dist.Store):
    """A store in which cluster 0's gloo address is that of a relay, and cluster 1's beyond it.

    Of two addresses gloo has the greater one connect, by host, then by port as it lies in memory:
    the same side for both clusters only if what they see of each other is in the same order.
    """

    def __init__(self, store: dist.Store, cluster: int) -> None:
        super().__init__()
        self._store: Any = store
        self._cluster = cluster
        self.relay: subprocess.Popen[str] | None = None

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore
        at = value.index(LOOPBACK)  # behind the port, in a sockaddr_in
        host, port = socket.inet_aton("127.255.0.1"), value[at - 2 : at]
        if self._cluster == 0:
            command = [sys.executable, str(RELAY), str(int.from_bytes(port, "big")), f"{LATENCY}"]
            self.relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self.relay.stdout is not None
            host, port = LOOPBACK, int(self.relay.stdout.readline()).to_bytes(2, "big")
        self._store.set(key, value[: at - 2] + port + host + value[at + 4 :])

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, *arguments: Any) -> None:  # pyright: ignore
        self._store.wait(*arguments)


def seconds_of_rounds() -> float:
    cluster = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, 2, is_master=cluster == 0)
    detour, seat = Detour(store, cluster), Seat.of(cluster, 2)
    try:
        groups = connect_gloo(detour, seat, timedelta(seconds=20), open_device("lo"))
        line = FragmentGroups(groups, seat, 20)
        round = to_all([torch.ones(1)], [[torch.empty(1)] for _ in range(2)])
        line.run(round, "first")  # both have come
        started = time.monotonic()
        for _ in range(ROUNDS):
            line.run(round, "round")
        elapsed = time.monotonic() - started
        line.run(round, "last")  # nobody leaves what the other one still reads
        return elapsed
    finally:
        if detour.relay is not None:
            detour.relay.kill()
            detour.relay.wait()


@pytest.mark.slow
def test_an_exchange_round_takes_two_one_way_latencies() -> None:
    for elapsed in run_distributed(seconds_of_rounds, 2):
        one_ways = elapsed / ROUNDS / LATENCY
        assert ROUND_ONE_WAYS - 0.1 < one_ways < ROUND_ONE_WAYS + 0.9
