"""What trains in `dsx bench chaos`: each engine, what it reads, and faults that befall it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dsx.bench.chaos.spoiling import Spoiler


def test_what_is_spoilt_is_spoilt_for_a_launch_alone() -> None:
    master, seen = torch.tensor([1.5, -2.0, 1e-9]), list[torch.Tensor]()
    before = master.clone()
    loop = SimpleNamespace(launch_due=lambda is_skipped=False: seen.append(master.clone()))
    spoiler = Spoiler(loop, lambda: [master])
    for factor in (None, 1e6, float("nan")):
        spoiler.factor = factor
        loop.launch_due()
        assert master.equal(before)
    assert seen[0].equal(before) and seen[1].equal(before * 1e6) and seen[2].isnan().all()
