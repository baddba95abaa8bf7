"""Clusters on the device that are saved, and new ones that load them and go on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import tests.checkpoint.test_outer_state as outer_state
from tests import tiny
from tests.gpu.simulated.programs.low_rank import CASES

STOPS = (3, 6)  # behind these steps: in a round, and at the end of one


def main(*names: str) -> None:
    """Save and resume these cases, all if none is named; print each that goes on to the bits."""
    tiny.ALL_CASES.update(CASES)
    outer_state.TinyNet = lambda: tiny.TinyNet().cuda()
    for name in names or CASES:
        for stop in STOPS:
            resume(name, stop)
            print("the same:", name, stop, flush=True)


def resume(name: str, stop: int) -> None:
    """Compare a run that was saved behind `stop` steps with one that was left alone."""
    first = outer_state.new_run(name)
    for _ in range(stop):
        first.train_step(loss_there)
    with tempfile.TemporaryDirectory() as folder:
        second = outer_state.resumed(first, name, Path(folder))
    whole = outer_state.new_run(name)
    for _ in range(outer_state.NUM_STEPS - stop):
        second.train_step(loss_there)
    for _ in range(outer_state.NUM_STEPS):
        whole.train_step(loss_there)
    assert second.loops[0].state.device.type == "cuda"
    outer_state.assert_the_same(second, whole)


def loss_there(model: torch.nn.Module, cluster: int, step: int) -> Tensor:
    """Return the loss of one cluster's batch, on the device."""
    return model(*(part.cuda() for part in tiny.batch(cluster, step)))
