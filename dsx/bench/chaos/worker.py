"""One rank of one cluster: trains a small model, and writes down what it does as it does it.

A line is written by one call, and stands whatever happens to the process behind it. What is written
are steps (with the numbers of the samples), launches and commits (with a hash of the anchor), and
the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dsx
from dsx.bench.chaos.job import Job, log_path, orders_path
from dsx.data import ClusterBatches
from dsx.training.handle import Handle

WIDTH, DEPTH, BATCH = 32, 4, 8
SPOILING = {"not_finite": float("nan"), "too_large": 1e6}
_SOUND = 1e3  # no parameter of a sound run comes near
_NUM_SAMPLES = 1 << 20  # of which no run reads all
_EVALUATED = range(10_000_000, 10_000_064)  # samples that nobody trains on


class RankLog:
    """A file of lines, each whole."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **fields: Any) -> None:
        """Write a line, with the time that no jump of a clock moves."""
        line = json.dumps({"what": what, "at": time.monotonic(), **fields})
        os.write(self._file, line.encode() + b"\n")


class Net(nn.Sequential):
    """A few layers, of which a teacher of the same shape is to be learnt."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        super().__init__(*layers[:-1])


class Numbers:
    """A data set of numbers, which samples are made of."""

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int, /) -> Tensor:
        return torch.tensor([index])


def batch_of(teacher: Net, samples: list[int]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [len * BATCH, WIDTH] of some samples, the same anywhere."""
    made = [torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(n)) for n in samples]
    inputs = torch.cat(made)
    with torch.no_grad():
        return inputs, teacher(inputs)


class Watch:
    """Tells the log what has been launched, committed and refused since the step before."""

    def __init__(self, handle: Handle, log: RankLog) -> None:
        self._loop, self._log = handle.loop, log
        history = self._loop.history
        self._launches, self._rounds = list(history.launches), list(history.rounds)
        self._applied = dict.fromkeys(range(history.num_fragments), 0)
        self._applied |= {f: transfer.launched for f, transfer in self._loop.last_applied.items()}

    def look(self) -> bool:
        """Write what is new: at most one of each fragment, as a period has more than one step.

        Returns whether anything has been launched.
        """
        history, has_launched = self._loop.history, False
        for fragment, launches in enumerate(history.launches):
            if self._launches[fragment] < launches:
                self._launches[fragment], has_launched = launches, True
                self._log.write("launch", fragment=fragment, step=history.launched[fragment])
        for fragment, transfer in self._loop.last_applied.items():
            if self._applied[fragment] == transfer.launched:
                continue
            self._applied[fragment] = transfer.launched
            was_taken = self._rounds[fragment] < history.rounds[fragment]
            self._rounds[fragment] = history.rounds[fragment]
            parity = transfer.buffers.parity
            self._log.write(
                "commit" if was_taken else "refused", fragment=fragment, step=transfer.launched,
                members=list(parity.ids), by=list(parity.refused_by), hash=self._hash(fragment),
            )  # fmt: skip
        return has_launched

    def _hash(self, fragment: int) -> str:
        anchor = self._loop.state.anchor[fragment].detach().cpu().contiguous()
        return hashlib.blake2b(anchor.numpy().tobytes(), digest_size=8).hexdigest()


class Orders:
    """What the driver wants, looked at before each step."""

    def __init__(self, path: Path, last_step: int) -> None:
        self._path, self._stamp = path, 0
        self._clock_moved = 0.0
        self._spoilt = dict.fromkeys(SPOILING, 0)  # the last order that was carried out
        self.given: dict[str, Any] = {"last_step": last_step}

    def look(self) -> None:
        """Take what is new."""
        try:
            stamp = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if stamp != self._stamp:
            self._stamp = stamp
            self.given |= json.loads(self._path.read_text())
        by = float(self.given.get("clock", 0.0))
        if by != self._clock_moved:
            _move_clock(by - self._clock_moved)
            self._clock_moved = by

    def spoils(self, step: int) -> float | None:
        """Return what this step's contribution is to be multiplied by, if it is to be wrong.

        From the step of an order on, up to the next launch.
        """
        for kind, factor in SPOILING.items():
            if self._spoilt[kind] < self.given.get(kind, 0) <= step:
                return factor
        return None

    def has_launched(self, step: int) -> None:
        """Note that something has been launched: what was to be spoilt, was."""
        for kind in SPOILING:
            if self.given.get(kind, 0) <= step:
                self._spoilt[kind] = self.given.get(kind, 0)


@contextlib.contextmanager
def spoilt(model: nn.Module, factor: float | None) -> Generator[None]:
    """Let what is read of the parameters meanwhile be wrong by a factor, as a flipped bit would."""
    if factor is None:
        yield
        return
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
        yield
        for parameter, before in zip(model.parameters(), kept, strict=True):
            if not parameter.abs().amax() < _SOUND:  # nothing else has been written into it
                parameter.copy_(before)


def _move_clock(by: float) -> None:
    """Let this process see another time of day."""
    now = time.time
    time.time = lambda: now() + by


def train(job: Job, cluster: int, rank: int) -> None:
    """Train until the last step; what ends it before is in the log, too."""
    directory = Path(job.directory)
    log = RankLog(log_path(directory, cluster, rank))
    log.write("begin", cluster=cluster, rank=rank, pid=os.getpid())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        _train(job, cluster, rank, log)
    except BaseException as error:
        log.write("failed", why=f"{type(error).__name__}: {error}")
        raise


def _train(job: Job, cluster: int, rank: int, log: RankLog) -> None:
    dsx.init_distributed(job.dsx(cluster))
    teacher, net = Net(job.seed + 1), Net(job.seed)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    handle = dsx.attach(model, optimizer, config=job.dsx(cluster))
    batches = ClusterBatches(  # all ranks of a cluster share a sample
        Numbers(), 1, cluster_id=cluster, num_clusters=job.num_clusters, rank=0, world_size=1,
        seed=job.seed,
    )  # fmt: skip
    handle.track(data=batches)
    handle.settle()  # where the others train already, it is behind this that it is one of them
    watch = Watch(handle, log)
    orders = Orders(orders_path(Path(job.directory), cluster), job.last_step)
    while handle.step < orders.given["last_step"]:
        step, began = handle.step + 1, time.perf_counter()
        sample = int(next(batches))
        inputs, targets = batch_of(teacher, [sample])
        own = slice(rank, None, job.num_ranks)
        loss = F.mse_loss(model(inputs[own]), targets[own])
        optimizer.zero_grad()
        loss.backward()
        with spoilt(net, orders.spoils(step)):
            optimizer.step()
        seconds = time.perf_counter() - began
        log.write("step", step=step, seconds=seconds, samples=[sample], loss=loss.item(),
                  members=list(handle.members))  # fmt: skip
        if watch.look():
            orders.has_launched(step)
        orders.look()
        time.sleep(max(0.0, job.step_seconds - (time.perf_counter() - began)))
    handle.finish()
    watch.look()
    history = handle.loop.history
    with handle.averaged(), torch.no_grad():
        inputs, targets = batch_of(teacher, list(_EVALUATED))
        loss = F.mse_loss(net(inputs), targets).item()
        weights = torch.cat([p.flatten() for p in net.parameters()])
    log.write(
        "end", step=history.step, loss=loss, launches=list(history.launches),
        rounds=list(history.rounds), members=list(handle.members),
        hash=hashlib.blake2b(weights.numpy().tobytes(), digest_size=8).hexdigest(),
    )  # fmt: skip
    handle.close()
