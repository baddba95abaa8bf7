"""One cluster, a process of plain PyTorch, which trains with everything on and off, in turns.

    python -m dsx.bench.telemetry.worker DIRECTORY CLUSTER

There are two models of one kind, each with a run of its own: one tells of itself in every way, the
other in none. Blocks follow one another as on, off, off, on, so that what else the machine does
meets both alike. Clocks are the training thread's, the process' and the wall's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import dsx
from dsx.bench.telemetry.job import Block, Job, log_path
from dsx.bench.worker_files import RankLog


class Layers(nn.Module):
    """Matrices one behind the other."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(job.width, job.width) for _ in range(job.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last one makes of `[rows, width]`, in the same shape."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Training:
    """A model, and its part of a run."""

    def __init__(self, job: Job, cluster: int, is_on: bool) -> None:
        self._job, self._is_on = job, is_on
        self._model = Layers(job)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self.handle = dsx.attach(self._model, self._optimizer, config=job.dsx(cluster, is_on))
        seed = torch.Generator().manual_seed(cluster)
        self._batch = torch.randn(job.rows, job.width, generator=seed)

    def block(self) -> Block:
        """Take the steps of a block, as a script does that tells its loss."""
        clocks = (time.thread_time, time.process_time, time.perf_counter)
        before = [clock() for clock in clocks]
        for _ in range(self._job.steps):
            self._optimizer.zero_grad()
            loss = self._model(self._batch).square().mean()
            loss.backward()
            self._optimizer.step()
            self.handle.log_step(loss=loss.item(), tokens=self._job.rows)
        spent = [(clock() - at) / self._job.steps for clock, at in zip(clocks, before, strict=True)]
        return Block(self._is_on, *spent)


def train(job: Job, cluster: int, log: RankLog) -> None:
    """Train all blocks, and write what each has cost; those before the first pair are not told."""
    dsx.init_distributed(job.dsx(cluster, False))
    on, off = (Training(job, cluster, is_on) for is_on in (True, False))
    for each in (on, off):
        each.block()  # allocates, opens files and connections
    log.write("trains")
    for pair in range(job.num_pairs):
        for each in (on, off) if pair % 2 == 0 else (off, on):
            log.write("block", **asdict(each.block()))
    for each in (on, off):
        each.handle.finish()
    log.write("end", missing=_missing(on))
    for each in (on, off):
        each.handle.close()


def _missing(training: Training) -> dict[str, int]:
    return training.handle._records._behind.missing.by_file()  # pyright: ignore[reportPrivateUsage]


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("cluster", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = Job.read(args.directory)
    train(job, args.cluster, RankLog(log_path(args.directory, args.cluster)))


if __name__ == "__main__":
    main()
