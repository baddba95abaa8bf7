"""A run whose script saves what it trains is told to end: by a real signal, on one of its ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsx
from dsx.comm.world import World
from dsx.training import parting
from tests.distributed import run_distributed
from tests.tiny import TinyNet, batch

TOLD, LAST = 7, 14
SIGNAL = signal.SIGUSR2


def config(run: str | None = None) -> dict[str, Any]:
    """Overlapped by a round, so that something is under way wherever the run ends."""
    return {
        "dsx": {
            "preset": "diloco_delayed",
            "clusters": {
                "num_clusters": 2,
                "deadline_seconds": 30,
                "preemption_signals": ["SIGUSR2"],
                "grace_seconds": 10.0,
            },
            "schedule": {"interval": 4},
            "metrics": {"dir": run},
        }
    }


class Script:
    """Trains a model with a handle; its callback saves, into its directory, what is its own."""

    def __init__(self, world: World, run: str | None = None) -> None:
        self.world = world
        net = TinyNet(world.cluster_id)
        self.model = nn.parallel.DistributedDataParallel(net) if world.world_size > 1 else net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.handle = dsx.attach(self.model, self.optimizer, config=config(run))
        self.handle.on_preemption(self.save)

    def save(self, directory: Path) -> None:
        if self.world.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, directory / "script.pt")

    def load(self, directory: Path) -> None:
        state = torch.load(directory / "script.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load(directory)

    def take_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(*batch(self.world.cluster_id, step, self.world.rank)).backward()
        self.optimizer.step()

    def trained(self) -> list[Any]:
        return [p.detach().clone().numpy() for p in self.model.parameters()]


def tell_cluster_0_to_end(run: str) -> tuple[int, int, bool]:
    """Return the exit status, its step, and whether what goes on is as if nothing had been."""
    parting._HARD_END_SECONDS = 1e6  # this process goes on
    world = dsx.init_distributed(config())
    whole = Script(world)
    for step in range(1, LAST + 1):
        whole.take_step(step)
    whole.handle.finish()
    whole.handle.close()
    told, status = Script(world, run), 0
    try:
        for step in range(1, LAST + 1):
            if step == TOLD and world.cluster_id == 0 and world.rank == 0:
                os.kill(os.getpid(), SIGNAL)
            told.take_step(step)
            time.sleep(0.1)  # H steps have to take longer than a notice does
        told.handle.finish()  # the other cluster may be here by then
    except SystemExit as ended:
        status = ended.code
    stopped = told.handle.step
    directory = Path(run) / f"checkpoints/cluster_{world.cluster_id}/preempted_step{stopped}"
    told.handle.close()
    resumed = Script(world)
    resumed.load(directory)
    for step in range(stopped + 1, LAST + 1):
        resumed.take_step(step)
    resumed.handle.finish()
    pairs = zip(whole.trained(), resumed.trained(), strict=True)
    return status, stopped, all((a == b).all() for a, b in pairs)


def fail_on_one_rank(run: str) -> str:
    """Return what a rank is told where the callback of another one of its cluster cannot write."""
    world = dsx.init_distributed(config())
    script = Script(world, run)

    def save(directory: Path) -> None:
        if world.rank == 1:
            raise OSError(28, "No space left on device")

    parting._HARD_END_SECONDS = 1e6  # this process goes on
    told: list[str] = []
    script.handle._records._outlets.not_saved = told.append
    script.handle.on_preemption(save)
    script.take_step(1)
    script.handle.preempt()
    with pytest.raises(SystemExit) as ended:
        for step in range(2, 10_000):
            script.take_step(step)
    assert ended.value.code == 128 + signal.SIGTERM
    (said,) = told
    return said


def test_the_callback_saves_and_both_clusters_go_on_bit_for_bit(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for status, stopped, is_equal in run_distributed(tell_cluster_0_to_end, 2, run):
        assert status == 128 + SIGNAL
        assert TOLD - 1 <= stopped <= LAST
        assert is_equal


@pytest.mark.ci
def test_where_a_callback_cannot_write_on_one_rank_all_end_as_told(tmp_path: Path) -> None:
    for said in run_distributed(fail_on_one_rank, 4, str(tmp_path / "run"), timeout_seconds=90):
        assert "rank 1: No space left on device" in said
        assert "is not saved" in said
