"""The cluster that is named is the one that was lost first, not one that ended because of it."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.comm import farewell
from dsx.comm.gloo import GlooTransport
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.compress.averaging import ExactMean
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, Submission
from tests.distributed import free_port, run_distributed
from tests.forked_commands import start_command

NUM_LOSSES = 24
_stores: list[dist.Store] = []  # the server lives as long as its process, which ends with all


def lose_one_again_and_again(num_clusters: int, num_losses: int) -> list[tuple[int, str]]:
    """Return, for every loss, the victim and what this cluster said; one after another loses it."""
    farewell._GRACE_SECONDS = 0.2  # all is on one host, which may be too busy to say it so soon
    cluster = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, num_clusters, is_master=cluster == 0)
    _stores.append(store)
    device, seat = open_device("lo"), Seat.of(cluster, num_clusters)
    said: list[tuple[int, str]] = []
    for loss in range(num_losses):
        here = dist.PrefixStore(f"loss {loss}", store)

        def connect(what: str, count: int, here: dist.Store = here) -> list[Any]:
            named = dist.PrefixStore(what, here)
            # longer than another one may wait for its loss, which it does by its deadline at most
            return connect_gloo(named, seat, timedelta(seconds=60), device, count)

        line = GlooTransport([0], connect, seat, 20.0)
        here.set(f"connected/{cluster}", "")
        here.wait([f"connected/{m}" for m in range(num_clusters)])
        victim, *survivors = random.Random(loss).sample(range(num_clusters), num_clusters)
        message = ""
        if cluster != victim:
            before = survivors[: survivors.index(cluster)] if loss % 2 else []
            here.wait(["ended/" + str(m) for m in [victim, *before]])  # else all at once
            exchange = ExactMean(seat).exchange(torch.ones(5))
            try:
                line.submit(Submission(0, loss), exchange).wait()
            except PeerLost as error:
                message = str(error)
        line.close()
        del line
        gc.collect()  # its connections are closed
        here.set(f"ended/{cluster}", "")
        said.append((victim, message))
    here.wait([f"ended/{m}" for m in range(num_clusters)])
    return said


@pytest.mark.ci
def test_the_first_one_lost_is_named_by_all() -> None:
    """Who ended because of it was named once in ten losses, before they told each other."""
    results = run_distributed(lose_one_again_and_again, 3, 3, NUM_LOSSES, timeout_seconds=200)
    for cluster, said in enumerate(results):
        wrong = [
            (victim, message)
            for victim, message in said
            if victim != cluster and f": cluster {victim} " not in message
        ]
        assert not wrong, f"cluster {cluster}, {len(wrong)} of {NUM_LOSSES}: {wrong[0]}"


@pytest.mark.ci
@pytest.mark.parametrize("victim", range(3))
def test_a_killed_site_is_named_by_the_two_others(victim: int, tmp_path: Path) -> None:
    store, launcher = free_port(), [free_port() for _ in range(3)]
    logs = [tmp_path / str(m) for m in range(3)]
    sites = [
        start_command(
            [sys.executable, "-m", "tests.comm.three_sites", str(m), str(store)],
            logs[m],
            {
                **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher[m]),
            },
        )
        for m in range(3)
    ]  # fmt: skip
    try:
        for site, log in zip(sites, logs, strict=True):
            while "training\n" not in log.read_text():
                assert site.poll() is None, log.read_text()
                time.sleep(0.05)
        sites[victim].kill()
        for m, site in enumerate(sites):
            if m != victim:
                site.wait(60)
                said = logs[m].read_text()
                assert re.search(f"^PeerLost: fragment .*: cluster {victim} ", said, re.M), said
    finally:
        for site in sites:
            site.kill()
            site.wait()
