"""A rank of a check: it trains, and writes what it has seen. Started by trained.py.

python -m dsx.bench.gpu.worker JOB.json
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist

import dsx
from dsx.bench.gpu.job import Job, Seen

_OURS = str(Path(dsx.__file__).parent)
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
    trainer = build(job, device)
    batches = [tokens_of(job.cluster, rank, step).to(device) for step in range(job.steps)]
    losses: list[torch.Tensor] = []
    syncs = collections.Counter[str]()
    started = 0.0
    for step, tokens in enumerate(batches):
        if step == _WARMED:
            started = time.perf_counter()
        losses.append(_watched(trainer.step, tokens, syncs) if is_cuda else trainer.step(tokens))
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / (job.steps - _WARMED)
    handle = trainer.handle
    totals, memory = handle.totals, handle.memory
    given = handle.loop.state.allocator.given
    handle.finish()
    hasher = blake2b(digest_size=8)
    with handle.averaged():
        for parameter in trainer.parameters():
            local = parameter.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            hasher.update(local.float().cpu().contiguous().numpy().tobytes())
    seen = Seen(
        [loss.item() for loss in losses], hasher.hexdigest(), dist.get_backend(), dict(syncs),
        sum(given.values()), memory.total, seconds, totals.blocked_seconds, totals.wait_seconds,
        totals.syncs,
    )  # fmt: skip
    job.result_path(rank).write_text(json.dumps(asdict(seen)))


def _watched(
    step: collections.abc.Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    syncs: collections.Counter[str],
) -> torch.Tensor:
    """Take a step; count where dsx makes the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return step(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for warning in caught:
                place = str(warning.filename)
                if "synchronizing" in str(warning.message) and place.startswith(_OURS):
                    syncs[f"{os.path.relpath(place, _OURS)}:{warning.lineno}"] += 1


if __name__ == "__main__":
    main(sys.argv[1])
