"""Over gloo, by the verbs of a handle: clusters that were told to end save where each one is."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsx
from tests.comm.test_network_equals_in_process import adamw, block, train
from tests.distributed import run_distributed
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

NAME, STEPS, LAST = "diloco_delayed", (5, 9), 14


def save_and_go_on(base: str) -> tuple[dict[str, Any], int]:
    """One cluster is four steps ahead, with a launch that the other has yet to make."""
    world = dsx.init_distributed(block(NAME, 2))
    steps, directory = STEPS[world.cluster_id], Path(base) / f"cluster_{world.cluster_id}"
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=block(NAME, 2))
    train(model, optimizer, world.cluster_id, steps)
    may_receive = handle.loop.stop_place.may_receive  # type: ignore[union-attr]
    told: Any = SimpleNamespace(reason="a signal", may_receive=may_receive)
    handle.loop.stop_place = told
    handle.save(directory)
    state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = TinyNet()
    inner = adamw(again)
    resumed = dsx.attach(again, inner, config=block(NAME, 2))
    again.load_state_dict(state[0])
    inner.load_state_dict(state[1])
    resumed.load(directory)
    assert resumed.step == steps
    train(again, inner, world.cluster_id, LAST - steps, steps + 1)
    resumed.finish()
    return {n: p.detach().numpy() for n, p in again.named_parameters()}, resumed.step


@pytest.mark.ci
def test_handles_go_on_from_unequal_steps(tmp_path: Path) -> None:
    results = run_distributed(save_and_go_on, 2, str(tmp_path))
    run = Simulated(TinyNet(), adamw, ALL_CASES[NAME].method(2), 2)
    for _ in range(LAST):
        run.train_step(mean_loss)
    run.finish()
    for (found, step), expected in zip(results, run.parameters(), strict=True):
        assert step == LAST
        assert all(torch.equal(torch.from_numpy(found[n]), p) for n, p in expected.items())
