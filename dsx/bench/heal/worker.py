"""One cluster, a process of plain PyTorch: trains, and writes down when it did what.

    python -m dsx.bench.heal.worker --directory DIR --cluster M [--load]

Times are of the clock that all processes of a host share.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import dsx
from dsx.bench.heal.job import Job, checkpoint_path, log_path, orders_path
from dsx.bench.worker_files import Orders, RankLog
from dsx.training.handle import Handle


class Layers(nn.Module):
    """Matrices one behind the other: little to compute for their size."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Linear(job.width, job.width, bias=False) for _ in range(job.num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last one makes of `[batch, width]`, in the same shape."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train(job: Job, cluster: int, loads: bool, log: RankLog) -> None:
    """Train until the driver says the last step; `loads`: the checkpoint first, or what it can."""
    directory, config = Path(job.directory), job.dsx(cluster)
    dsx.init_distributed(config)
    log.write("met")
    model = Layers(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = dsx.attach(model, optimizer, config=config)
    where = checkpoint_path(directory, cluster)
    if loads:
        model.load_state_dict(torch.load(where / "model.pt"))
        handle.load(where)
    log.write("attached")
    handle.settle()
    healing = handle.joining.healed
    if healing is not None:
        log.write("healed", copied_bytes=healing.copied_bytes, held_bytes=healing.held_bytes,
                  seconds=healing.seconds, step=handle.step)  # fmt: skip
    batch = torch.randn(2, job.width, generator=torch.Generator().manual_seed(cluster))
    orders = Orders(orders_path(directory), save_at=-1, last_step=1 << 40)
    while handle.step < orders.given["last_step"]:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        time.sleep(max(0.0, job.step_seconds - (time.perf_counter() - began)))
        optimizer.step()  # and what dsx has the training thread do, and wait for
        handle.should_stop()
        seconds = time.perf_counter() - began
        log.write("step", step=handle.step, seconds=seconds, members=list(handle.members))
        orders.look()
        if handle.step == orders.given["save_at"]:
            _save(handle, model, where)
            log.write("saved", step=handle.step)
    handle.finish()
    log.write("end", step=handle.step)
    handle.close()


def _save(handle: Handle, model: nn.Module, where: Path) -> None:
    with handle.saving():
        handle.save(where)
        torch.save(model.state_dict(), where / "model.pt")
    handle.saved(where)


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--load", action="store_true")
    args = parser.parse_args()
    log = RankLog(log_path(args.directory, args.cluster))
    log.write("begin")
    train(Job.read(args.directory), args.cluster, args.load, log)


if __name__ == "__main__":
    main()
