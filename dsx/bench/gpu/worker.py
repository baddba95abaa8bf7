"""A rank of a check: it trains, and writes what it has seen. Started by runs.py.

python -m dsx.bench.gpu.worker JOB.json
"""

from __future__ import annotations

import collections
import json
import sys
import time
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dsx
from dsx.bench.gpu.job import Job, Seen
from dsx.bench.gpu.sync_watch import watched

if TYPE_CHECKING:
    from dsx.bench.gpu.engines import Trainer

_WARMED = 8  # steps that are not timed


def main(path: str) -> None:
    """Train as the job in a file says."""
    job = Job.read(Path(path))
    if job.device == "cpu" and job.engine.startswith("megatron"):
        from dsx.bench.megatron_on_cpu import install

        install()
    from dsx.bench.gpu.engines import build, tokens_of

    dsx.init_distributed(job.dsx())
    rank = dist.get_rank()
    is_cuda = job.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    if job.saves_at or job.loads:  # to be compared bit by bit
        torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = build(job, device)
    if job.loads:
        _load(job, trainer)
    batches = [tokens_of(job.cluster, rank, step).to(device) for step in range(job.steps)]
    losses: list[torch.Tensor] = []
    syncs = collections.Counter[str]()
    started, first_timed = 0.0, max(_WARMED, trainer.handle.step)
    for step, tokens in enumerate(batches):
        if step < trainer.handle.step:
            continue  # before what was loaded
        if step == job.saves_at != 0:
            _save(job, trainer)
            return
        if step == first_timed:
            started = time.perf_counter()
        is_watched = is_cuda and step > 0  # in a first step DeepSpeed's clusters begin together
        losses.append(watched(trainer.step, tokens, syncs) if is_watched else trainer.step(tokens))
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / (job.steps - first_timed)
    handle = trainer.handle
    totals, memory = handle.totals, handle.memory
    given = handle.loop.state.allocator.given
    handle.finish()
    hasher = blake2b(digest_size=8)
    with handle.averaged():
        for parameter in trainer.parameters():
            local: Any = parameter.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            hasher.update(local.float().cpu().contiguous().numpy().tobytes())
    seen = Seen(
        [loss.item() for loss in losses], hasher.hexdigest(), dist.get_backend(), dict(syncs),
        sum(given.values()), memory.total, seconds, totals.blocked_seconds, totals.wait_seconds,
        totals.syncs,
    )  # fmt: skip
    job.result_path(rank).write_text(json.dumps(asdict(seen)))


def _save(job: Job, trainer: Trainer) -> None:
    """Save what a script saves, and dsx's beside it."""
    folder = job.saved_path()
    with trainer.handle.saving():
        trainer.handle.save(folder)
        torch.save([one.state_dict() for one in trainer.stateful], folder / "script.pt")
    trainer.handle.close()
    job.result_path(dist.get_rank()).write_text("{}")


def _load(job: Job, trainer: Trainer) -> None:
    """Load what `_save` has saved."""
    folder = replace(job, folder=job.loads).saved_path()
    saved = torch.load(folder / "script.pt", weights_only=True)
    for one, state in zip(trainer.stateful, saved, strict=True):
        one.load_state_dict(state)
    trainer.handle.load(folder)


if __name__ == "__main__":
    main(sys.argv[1])
