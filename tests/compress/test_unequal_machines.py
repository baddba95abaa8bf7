"""Clusters whose processors differ: other vector units, other numbers of threads, equal bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORKER = """
import hashlib, sys
from datetime import timedelta
import torch, torch.distributed as dist
from dsx.core.membership import Seat
from dsx.comm.gloo import FragmentGroups
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.compress.base import Launch
from dsx.compress.low_rank import LowRank
from tests.compress.matrices import plain_low_rank
from dsx.compress.quantized import Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.compress.top_k import TopK
from dsx.core.types import Fragment, Slot

rank, count, threads, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(threads)
store = dist.FileStore(path, count)
seat = Seat.of(rank, count)
groups = connect_gloo(store, seat, timedelta(seconds=60), open_device(None))
group = FragmentGroups(groups, seat, 60.0)
slots, offset = [], 0
for index, shape in enumerate([(96, 160), (300, 64), (77,)]):
    slots.append(Slot(f"w{index}", shape, offset))
    offset += slots[-1].numel
fragment = Fragment(0, 0, tuple(slots))
digests = []
for compression in (
    Quantized(error_feedback="fp32"), Quantized(wire="ternary"), Quantized(wire="fp8"), TopK(),
    RandomTopK(),
    plain_low_rank(rank=12, error_feedback="fp32"), plain_low_rank(rank=12, factor_wire="int4"),
):
    channel = compression.open(fragment, Seat.of(rank, count), 0)
    for round in range(1, 4):
        generator = torch.Generator().manual_seed(100 * round + rank)
        x = torch.randn(fragment.numel, generator=generator)
        own = x.clone()
        for messages in channel.exchange(x, Launch(round)):
            group.run(messages, "test")
        channel.settle(own, Launch(round))
        digests.append(hashlib.sha256(x.numpy().tobytes()).hexdigest()[:12])
print(torch.backends.cpu.get_cpu_capability(), *digests)
"""


@pytest.mark.ci
def test_clusters_on_unequal_machines_apply_the_same_bits(tmp_path: Path) -> None:
    best = torch.backends.cpu.get_cpu_capability().lower()  # asked for more, it ends in SIGILL
    middle = min("avx2", best, key=["default", "avx2", "avx512"].index)
    machines = [("default", 1), (middle, 2), (best, 1), (best, 2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(len(machines)), str(threads)]
            + [str(tmp_path / "store")],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, (capability, threads) in enumerate(machines)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), outputs
    results = [out.split() for out, _ in outputs]
    if len({used for used, *_ in results}) == 1:
        pytest.skip(f"this processor has one level only: {results[0][0]}")
    assert len({tuple(digests) for _, *digests in results}) == 1, results
    assert len(set(results[0][1:])) == 21  # seven codecs, three rounds, each its own mean
