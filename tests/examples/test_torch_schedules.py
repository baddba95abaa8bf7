"""A schedule that DeepSpeed lacks is made by torch, from what a DeepSpeed JSON says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR

from dsx.examples.torch_schedules import take_torch_schedule


def test_cyclic_rates_are_torchs() -> None:
    """Triangles that halve in height, whose first ascent is a warm-up."""
    params = {"base_lr": 0.0, "max_lr": 1.0, "step_size_up": 2, "mode": "triangular2",
              "cycle_momentum": False}  # fmt: skip
    config: dict[str, Any] = {"scheduler": {"type": "CyclicLR", "params": params}, "kept": 1}
    make = take_torch_schedule(config)
    assert make is not None and config == {"kept": 1}
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=9.0)
    schedule = make(optimizer)
    assert isinstance(schedule, CyclicLR)
    rates: list[float] = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]


@pytest.mark.parametrize("config", [{}, {"scheduler": {"type": "WarmupCosineLR", "params": {}}}])
def test_deepspeeds_own_are_left_to_it(config: dict[str, Any]) -> None:
    before = dict(config)
    assert take_torch_schedule(config) is None
    assert config == before


@pytest.mark.parametrize("name", ["CircularLR", "Optimizer"])
def test_an_unknown_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"scheduler.type='{name}'.*WarmupCosineLR.*CyclicLR"):
        take_torch_schedule({"scheduler": {"type": name}})
