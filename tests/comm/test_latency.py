"""What a line's latency costs a round over gloo, behind a relay that delays every byte."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dsx.comm.gloo import FragmentGroups
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.core.exchange import to_all
from dsx.core.membership import Seat
from dsx.plan.link import ROUND_ONE_WAYS
from tests.comm.detour import Detour
from tests.distributed import run_distributed

LATENCY, ROUNDS = 0.05, 5


def seconds_of_rounds() -> float:
    cluster = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, 2, is_master=cluster == 0)
    detour, seat = Detour(store, cluster, LATENCY), Seat.of(cluster, 2)
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
        detour.close()


@pytest.mark.slow
def test_an_exchange_round_takes_two_one_way_latencies() -> None:
    for elapsed in run_distributed(seconds_of_rounds, 2):
        one_ways = elapsed / ROUNDS / LATENCY
        assert ROUND_ONE_WAYS - 0.1 < one_ways < ROUND_ONE_WAYS + 0.9
