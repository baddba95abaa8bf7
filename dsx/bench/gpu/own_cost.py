"""What dsx takes of a device and of its training thread: a larger GPT, with dsx and without.

One process, one model: steps without dsx, steps with it attached (one cluster: what is launched is
coded, and applied, but goes nowhere), and steps without it again. Times are of whole blocks of
steps between two synchronisations of the device.

python -m dsx.bench.gpu.own_cost JOB.json
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dsx
from dsx.bench.gpu.job import Job
from dsx.examples.gpt import GPT, GPTConfig

LARGE = GPTConfig(
    num_layers=16, hidden_size=1536, num_heads=12, sequence_length=1024, vocab_size=32000
)
SMALL = GPTConfig(num_layers=2, hidden_size=64, num_heads=2, sequence_length=64, vocab_size=512)
_WARMED, _BLOCK = 4, 16


@dataclass(frozen=True)
class OwnCost:
    """Seconds of a step, and bytes on the device; `blocked_seconds` are of a step, in dsx."""

    num_parameters: int
    rows: int
    interval: int
    without: list[float]
    attached: list[float]
    again: list[float]
    blocked_seconds: float
    planned_bytes: int
    held_bytes: int
    peak_bytes: int

    @property
    def overhead(self) -> float:
        """What a step takes longer, as a share of one without dsx."""
        bare = statistics.mean([*self.without, *self.again])
        return statistics.mean(self.attached) / bare - 1


def measure(job: Job, rows: int, blocks: int) -> OwnCost:
    """Train; `rows` are of a step, and `blocks` of each kind are timed."""
    device = torch.device(job.device)
    is_cuda = device.type == "cuda"
    net = GPT(LARGE if is_cuda else SMALL).to(device)
    shape = LARGE if is_cuda else SMALL
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    size = (rows, shape.sequence_length + 1)
    tokens = torch.randint(shape.vocab_size, size, device=device)
    wait = torch.cuda.synchronize if is_cuda else lambda: None
    held = torch.cuda.memory_allocated if is_cuda else lambda: 0
    peak = torch.cuda.max_memory_allocated if is_cuda else lambda: 0
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        with autocast():
            loss = net(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()

    timed = functools.partial(_block, step, wait)
    timed(_WARMED)
    peak_before = peak()
    without = [timed(_BLOCK) for _ in range(blocks)]
    before = held()
    handle = dsx.attach(net, optimizer, config=job.dsx())
    interval = handle.loop.method.schedule.interval
    timed(interval + _WARMED)  # what comes once, and kernels
    blocked, since = handle.totals.blocked_seconds, handle.step
    attached = [timed(_BLOCK) for _ in range(blocks)]
    blocked = (handle.totals.blocked_seconds - blocked) / (handle.step - since)
    planned = handle.memory.on_device(job.state)  # pyright: ignore[reportArgumentType]
    grown, highest = held() - before, peak() - peak_before
    handle.finish()
    handle.close()
    gc.collect()
    again = [timed(_BLOCK) for _ in range(blocks)]
    return OwnCost(
        sum(p.numel() for p in net.parameters()), rows, interval, without, attached, again,
        blocked, planned, grown, highest,
    )  # fmt: skip


def _block(step: Callable[[], None], wait: Callable[[], None], count: int) -> float:
    """Return the seconds of a step, of so many."""
    wait()
    started = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - started) / count


def main(path: str) -> None:
    """Measure as the job in a file says, and write it where rank 0 tells."""
    job = Job.read(Path(path))
    dsx.init_distributed(job.dsx())
    is_cuda = job.device == "cuda"
    cost = measure(job, 8 if is_cuda else 2, 2 if is_cuda else 1)
    job.result_path(0).write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main(sys.argv[1])
