"""A run whose settings were changed as it went on, saved and gone on with, is one that was never
stopped: the changed values hold at the same rounds, whatever the configuration says.
"""  # fmt: skip

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.core.types import History
from dsx.method.changes import INTERVAL, MOMENTUM, RATE, require_change
from dsx.training.changing import SETTABLE, Changing
from tests.checkpoint.half_arrived import assert_same, catch_up, resume, save_all
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

AT, AGAIN, LAST = 9, 13, 21
CHANGES = [
    ("diloco", {RATE: 0.3, MOMENTUM: 0.5}, {RATE: 0.6}),
    ("streaming_diloco", {INTERVAL: 8}, {INTERVAL: 5, MOMENTUM: 0.2}),
    pytest.param("diloco_delayed", {INTERVAL: 6, RATE: 0.4}, {INTERVAL: 3}, marks=pytest.mark.ci),
    pytest.param("recommended", {INTERVAL: 6}, {RATE: 0.4}, marks=pytest.mark.ci),
]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def new_run(name: str) -> Simulated:
    return Simulated(TinyNet(), adamw, ALL_CASES[name].method(2), 2)


def train(run: Simulated, last: int, changes: Mapping[int, Mapping[str, float]]) -> None:
    """Train up to a step; a change is made at the boundary of a step, behind it."""
    while run.num_steps < last:
        run.train_step(mean_loss)
        for loop in run.loops:
            for key, value in changes.get(run.num_steps, {}).items():
                changed, fragments = loop.history.changed, len(loop.adapter.fragments)
                changed[key] = require_change(run.method, changed, key, value, fragments, 1)


@pytest.mark.parametrize(("name", "first", "then"), CHANGES)
def test_it_goes_on_with_what_was_set(
    name: str, first: dict[str, float], then: dict[str, float], tmp_path: Path
) -> None:
    changes = {AT: first, AGAIN: then}
    whole, plain = new_run(name), new_run(name)
    train(whole, LAST, changes)
    train(plain, LAST, {})
    ours, theirs = whole.parameters()[0], plain.parameters()[0]
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)
    for stop in (AT, AGAIN - 1, AGAIN + 1):  # a change may come behind the load
        before, after = new_run(name), new_run(name)
        train(before, stop, changes)
        save_all(before, tmp_path / f"{stop}")
        resume(after, before, tmp_path / f"{stop}")
        catch_up(after, mean_loss)
        assert after.loops[0].history.changed == before.loops[0].history.changed != {}
        train(after, LAST, {at: one for at, one in changes.items() if at > stop})
        assert_same(after, whole)


class World:
    """What a change needs of a rank."""

    rank = 0

    def __init__(self) -> None:
        self.limits: list[float] = []
        self.history, self.verbs = History(1), dict[str, Any]()

    def limit_rate(self, mbit: float) -> None:
        self.limits.append(mbit)

    def offer(self, do: str, check: Any) -> None:
        self.verbs[do] = check


def test_the_rate_of_the_line_is_limited_again_as_it_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world: Any = World()
    changing = Changing(world, world, world)
    changing.loaded()
    assert not world.limits
    world.history.changed = {"link.rate_mbit": 250.0, RATE: 0.3}
    changing.loaded()
    assert world.limits == [250.0]
    assert "going on with link.rate_mbit=250, outer_optimizer.lr=0.3, as dsx ctl" in caplog.text


def test_what_cannot_change_is_refused_with_what_can() -> None:
    world: Any = World()
    Changing(world, world, world)
    with pytest.raises(ValueError, match="'clusters.deadline_seconds' cannot change") as refused:
        world.verbs["set"]({"key": "clusters.deadline_seconds", "value": 5})
    assert all(key in str(refused.value) for key in SETTABLE)
