"""Files that a process may have open: raised before connections are made, or refused by numbers."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsx.comm.gloo_groups import GlooConnections, open_device
from dsx.comm.joining import RendezvousConfig, join_own_launcher
from dsx.comm.open_files import make_room, raise_file_limit, take_all_room
from dsx.comm.topology import LauncherEnvironment
from dsx.core.membership import Seat

NAME = resource.RLIMIT_NOFILE


def limited(soft: int, hard: int, do: Callable[..., Any], *arguments: Any) -> Any:
    """What `do` leads to in a child with these limits: its limits then, or its error."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        said: Any = "it has died"
        try:
            resource.setrlimit(NAME, (soft, hard))
            do(*arguments)
            said = resource.getrlimit(NAME)
        except ValueError as error:
            said = str(error)
        finally:
            os.write(writes, json.dumps(said).encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        said = json.loads(told.read())
    os.waitpid(pid, 0)
    return tuple(said) if isinstance(said, list) else said


def connect_many(num_groups: int) -> None:
    device = open_device("lo")
    seat, deadline = Seat.of(0, 3), timedelta(seconds=20)
    GlooConnections(dist.HashStore(), seat, deadline, device, num_groups)


def host_store(ranks: int) -> None:
    launcher = LauncherEnvironment(0, ranks, "127.0.0.1", 1, False)
    config = RendezvousConfig(8, 0, "tcp://127.0.0.1:1", "cluster_0", 5.0, 5.0, "lo")
    join_own_launcher(launcher, config)


def test_the_soft_limit_is_raised() -> None:
    soft, hard = limited(600, 5000, make_room, 2000, "many")
    assert hard == 5000 and 2000 + 256 < soft < 2000 + 256 + 200
    assert limited(4000, 5000, make_room, 2000, "many") == (4000, 5000)  # never lowered
    assert limited(600, 5000, take_all_room) == (5000, 5000)


def test_what_the_hard_limit_forbids_is_refused_by_numbers() -> None:
    said = limited(600, 900, raise_file_limit, 901, "many callers")
    assert said.startswith("many callers may take 901 open files, and this process may have 900: ")
    assert "ulimit -Hn" in said


def test_connections_to_peers_are_counted_before_any_is_made() -> None:
    soft, _ = limited(400, 5000, connect_many, 500)
    assert 2 * 500 + 256 < soft < 5000
    assert limited(400, 1000, connect_many, 500).startswith(
        "500 connections to each of 2 clusters may take 1"
    )


def test_who_hosts_the_store_of_all_says_what_it_lacks() -> None:
    assert limited(400, 5000, host_store, 1024).startswith("the store of 8 x 1024 ranks may take 8")
