"""What rounds of many short messages cost on the wire: a run's own, of factors in int4.

A model of 0.24 M parameters goes through rounds of the preset dilocox, as `dsx bench e2e` runs it
after its dense ones, back to back and without training: random gradients move it. Handshakes,
headers and commits travel as in a run, and so does the log where there are links.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

import dsx
from dsx.bench.e2e.job import Shape, build_model
from dsx.bench.e2e.plan import LEAST_INTERVAL, Situation, plan_preset
from dsx.bench.links.job import Found, Job, Passed
from dsx.bench.testbed import read_traffic
from dsx.core.types import ParameterShape
from dsx.plan.link import Link

PRESET = "dilocox"
SHAPE = Shape(batch_size=1)
_WARM_ROUNDS = 3  # connections stand, and codecs have their state
_LAUNCHER_PORT = 29500


def measure_rounds(job: Job, cluster: int) -> Found:
    """Meet the other end as a run does, take the job's rounds, and return what they sent."""
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_LAUNCHER_PORT)}
    config = _config(job, cluster)
    dsx.init_distributed(config)
    model = build_model(SHAPE, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = dsx.attach(model, optimizer, config=config)
    generator = torch.Generator().manual_seed(cluster)

    def take_rounds(count: int) -> None:
        for _ in range(count * LEAST_INTERVAL):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        for transfer in handle.loop.in_flight:
            pending: Any = getattr(transfer, "pending", None)
            if pending is not None:
                pending.wait()

    for _ in range(_WARM_ROUNDS):
        take_rounds(1)
    wire, payload = _bytes_on_wire(), handle.totals.bytes_sent
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(job.rounds):
        take_rounds(1)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    passed = Passed(seconds, cpu, handle.totals.bytes_sent - payload, _bytes_on_wire() - wire)
    handle.finish()
    handle.close()
    return Found(passed, [], [])


def _config(job: Job, cluster: int) -> dict[str, Any]:
    way = job.way(cluster)
    clusters: dict[str, Any] = {
        "num_clusters": 2, "cluster_id": cluster, "interface": job.interface,
        "deadline_seconds": job.deadline_seconds,
    }  # fmt: skip
    link: dict[str, Any] = {"security": way.security}
    if way.link is None:
        clusters["rendezvous"] = way.rendezvous
    else:
        link |= {
            "transport": "link", "members": list(way.link.members), "keys": way.link.keys,
            "port": way.link.port,
        }  # fmt: skip
    named = build_model(SHAPE, 0).named_parameters()
    shapes = [ParameterShape(name, tuple(p.shape)) for name, p in named]
    situation = Situation(shapes, 1.0, Link(1e9), 2)
    block = plan_preset(PRESET, LEAST_INTERVAL, situation, 1.0).block
    return {"dsx": {**block, "clusters": clusters, "link": link}}


def _bytes_on_wire() -> int:
    return read_traffic(Path("/proc/net/dev").read_text()).bytes_sent
