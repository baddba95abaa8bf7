"""One rank that starts as a run's do, with a small model, and finds what that has cost."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import dsx
from dsx.bench.start.job import MODEL, WORLD, Found, Job
from dsx.bench.start.laps import Laps, num_sockets
from dsx.bench.start.over_links import Asked, gateway_of, link_of
from dsx.comm import world as worlds
from dsx.engines.cluster_collectives import new_host_group

PRESET = "recommended"
_WIDTH, _LAYERS = 32, 4


def start(job: Job, cluster: int, rank: int) -> tuple[Found, Any]:
    """Meet, attach, and return what that has cost, and what is to live until all have done so.

    Two groups of all ranks on the host follow, which every engine has whose own are NCCL's.
    """
    port = job.ports[cluster]
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    os.environ |= {name: str(value) for name, value in environment.items()}
    config = {"dsx": {"preset": PRESET, "clusters": _clusters(job, cluster)}}
    if job.keys:
        config["dsx"]["link"] = link_of(job, cluster)
    laps = Laps(Asked() if job.keys else job.meeting, port)
    laps.around(worlds, "init_cluster_world", "stores", WORLD)
    laps.around(worlds.World, "connect", "compare", "connect")
    dsx.init_distributed(config)
    laps.lap("meet")
    torch.manual_seed(0)
    model = small_model()
    wrapped = nn.parallel.DistributedDataParallel(model) if job.ranks > 1 else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    laps.lap(MODEL)
    handle = dsx.attach(wrapped, optimizer, config=config)
    laps.lap("begin")
    groups = [new_host_group(range(job.ranks)) for _ in range(2 if job.ranks > 1 else 0)]
    laps.lap("host groups")
    found = Found(cluster, rank, laps.laps, num_sockets(), *gateway_of(worlds.current_world()))
    return found, (handle, groups)


def small_model() -> nn.Module:
    """Return the model."""
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _clusters(job: Job, cluster: int) -> dict[str, Any]:
    meeting = {} if job.keys else {"rendezvous": f"tcp://127.0.0.1:{job.meeting}"}
    return {
        "num_clusters": job.num_clusters, "cluster_id": cluster, "interface": "lo", **meeting,
        "join_deadline_seconds": job.deadline_seconds, "deadline_seconds": job.deadline_seconds,
    }  # fmt: skip
