"""One process of a run of torchft: a replica group that trains with its DiLoCo, or the lighthouse.

A group trains the model of dsx's run on that run's data, a sample a step, and writes down its steps
and rounds as it does them: what torchft has done with a round is read from what it has asked of the
outer optimizer, and from who was in the process group. It keeps its place in its data at each step,
as torchft's own example advises, since no other group reads them.
"""

# torchft need not be installed where types are checked:
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import TCPStore
from torch.optim import SGD, AdamW
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from dsx.bench.chaos.against.job import FEWEST, LIGHTHOUSE, GroupJob, final_path, place_path
from dsx.bench.chaos.engines.engine import digest
from dsx.bench.chaos.engines.teacher import RATE, Net, Numbers, Teacher
from dsx.bench.chaos.job import log_path, orders_path
from dsx.bench.chaos.worker import FaultOrders
from dsx.bench.worker_files import RankLog
from dsx.data import ClusterBatches

_HOST = "127.0.0.1"
_FOR_EVER = 1_000_000_000


class WatchedGloo(ProcessGroupGloo):
    """torchft's process group over gloo, which notes who is in it."""

    quorum: int | None = None
    members: Sequence[int] = ()

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Note whom torchft has told to be in it, and let it do as ever."""
        self.quorum, self.members = quorum_id, sorted(global_ranks or [])
        super().configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size,
            global_ranks,
        )  # fmt: skip


def parts_of(net: nn.Sequential, count: int) -> list[nn.Module]:
    """Return the model in so many fragments of whole layers; torchft asks for parameters alone."""
    layers = [layer for layer in net if [*layer.parameters()]]
    if len(layers) % count:
        raise ValueError(f"{len(layers)} layers are no {count} fragments of whole ones")
    size = len(layers) // count
    runs = [layers[first : first + size] for first in range(0, len(layers), size)]
    return [nn.ParameterList([p for layer in run for p in layer.parameters()]) for run in runs]


class Group:
    """A replica group: its model, its optimizers, and torchft around them."""

    def __init__(self, job: GroupJob, cluster: int, log: RankLog) -> None:
        self.job, self.cluster, self.log = job, cluster, log
        self.count = 0  # steps of this process
        self.applied: str | None = None  # the hash of what the outer optimizer has made just now
        self.teacher, self.net = Teacher(job.seed), Net(job.seed)
        self.inner = AdamW(self.net.parameters(), lr=RATE)
        self.parts = parts_of(self.net, job.fragments)
        self.group = WatchedGloo(timeout=timedelta(seconds=job.collective_timeout_seconds))
        self.manager = self._manager()
        self.diloco = DiLoCo(
            self.manager, self.parts, self.inner, [self._outer(part) for part in self.parts],
            sync_every=job.interval, fragment_sync_delay=job.delay,
            fragment_update_alpha=job.alpha,
        )  # fmt: skip
        self.batches = ClusterBatches(
            Numbers(), 1, cluster_id=cluster, num_clusters=job.num_clusters, rank=0, world_size=1,
            seed=job.seed,
        )  # fmt: skip
        self._place = place_path(Path(job.directory), cluster)
        if self._place.exists():
            self.batches.load_state_dict(json.loads(self._place.read_text()))

    def _manager(self) -> Manager:
        job = self.job
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        transport = HTTPTransport(
            timeout=timedelta(seconds=job.transport_timeout_seconds), num_chunks=0
        )
        return Manager(
            pg=self.group, load_state_dict=self._load, state_dict=self._state,
            min_replica_size=FEWEST, use_async_quorum=False,
            timeout=timedelta(seconds=job.manager_timeout_seconds),
            quorum_timeout=timedelta(seconds=job.quorum_timeout_seconds),
            connect_timeout=timedelta(seconds=job.quorum_timeout_seconds), rank=0, world_size=1,
            store_addr=_HOST, store_port=self._store.port,
            lighthouse_addr=f"http://{_HOST}:{job.lighthouse_port}",
            replica_id=f"cluster_{self.cluster}", hostname=_HOST,
            heartbeat_interval=timedelta(seconds=job.heartbeat_interval_seconds),
            checkpoint_transport=transport, init_sync=False, quorum_retries=job.quorum_retries,
        )  # fmt: skip

    def _outer(self, part: nn.Module) -> SGD:
        outer = SGD(
            part.parameters(), lr=self.job.outer_lr, momentum=self.job.outer_momentum,
            nesterov=True,
        )  # fmt: skip

        def note(*_: Any) -> None:
            self.applied = digest(part.parameters())

        outer.register_step_post_hook(note)
        return outer

    def _state(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "inner": self.inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        """Take what another group has: torchft heals this one."""
        self.net.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.log.write("heal", count=self.count)

    def step(self) -> int:
        """Take an inner step, and a round where one is due; return which round is next."""
        began, sample = time.perf_counter(), int(next(self.batches))
        inputs, targets = self.teacher.batch_of([sample])
        self.inner.zero_grad()
        loss = F.mse_loss(self.net(inputs), targets)
        loss.backward()
        self.count, self.applied = self.count + 1, None
        self.inner.step()
        round_, place = self.manager.current_step(), self.count % self.job.every
        self.log.write(
            "step", step=round_ * self.job.every + place, count=self.count, samples=[sample],
            seconds=time.perf_counter() - began, loss=loss.item(), members=self.group.members,
        )  # fmt: skip
        if not place:
            is_kept = self.applied is not None
            self.log.write(
                "round", round=round_ - is_kept, count=self.count,
                prepared=self.count - self.job.delay, fragment=(round_ - is_kept) % len(self.parts),
                is_kept=is_kept, hash=self.applied, quorum=self.group.quorum,
                members=self.group.members,
            )  # fmt: skip
        new = self._place.with_suffix(".new")
        new.write_text(json.dumps(self.batches.state_dict()))
        new.rename(self._place)
        time.sleep(max(0.0, self.job.step_seconds - (time.perf_counter() - began)))
        return round_

    def end(self, round_: int) -> None:
        """Leave the model as it is now; training goes on, for those who are not there yet."""
        path = final_path(Path(self.job.directory), self.cluster)
        torch.save(self.net.state_dict(), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        self.log.write("end", round=round_, count=self.count)


def train(job: GroupJob, cluster: int, rank: int) -> None:
    """Be a group until the process is ended, or told to leave by SIGTERM; or the lighthouse."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if cluster == LIGHTHOUSE:
        _shine(job)
        return
    log = RankLog(log_path(Path(job.directory), cluster, rank))
    log.write("begin", cluster=cluster, rank=rank, pid=os.getpid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    is_told: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: is_told.append(True))
    try:
        _train(job, cluster, log, is_told)
    except BaseException as error:
        log.write("failed", why=f"{type(error).__name__}: {error}")
        raise


def _train(job: GroupJob, cluster: int, log: RankLog, is_told: Sequence[bool]) -> None:
    group = Group(job, cluster, log)
    orders, has_ended = FaultOrders(orders_path(Path(job.directory), cluster), _FOR_EVER), False
    with group.diloco:
        while not is_told:
            round_ = group.step()
            orders.look()
            if not has_ended and round_ >= orders.given["last_step"]:
                group.end(round_)
                has_ended = True
    group.manager.shutdown(wait=False)
    log.write("left")


def _shine(job: GroupJob) -> None:
    """Be the lighthouse, until the process is ended."""
    lighthouse = LighthouseServer(
        f"{_HOST}:{job.lighthouse_port}", FEWEST,
        join_timeout_ms=round(1000 * job.join_timeout_seconds),
        heartbeat_timeout_ms=round(1000 * job.heartbeat_timeout_seconds),
    )  # fmt: skip
    print(f"the lighthouse is at {lighthouse.address()}", file=sys.stderr, flush=True)
    while True:
        signal.pause()
