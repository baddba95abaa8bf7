"""A cluster whose optimizer skips all steps of a round: counted, told of, and ended in the end."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsx.config.schema import load_config, preset
from dsx.engines.torch import TorchAdapter
from dsx.method.method import Method
from dsx.outer.recovery import NonFiniteError
from tests.simulated import Simulated
from tests.tiny import TinyNet, mean_loss

METHOD = replace(preset("diloco", schedule={"interval": 4}), max_idle_rounds=3)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def take_steps(run: Simulated, steps: range, skipping: set[int]) -> None:
    """Take inner steps; those of `skipping` clusters are skipped, as a GradScaler does."""
    for step in steps:
        for cluster, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
            optimizer.zero_grad()
            mean_loss(model, cluster, step).backward()
            if cluster not in skipping:
                optimizer.step()
        run.step(skipping)


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "eager", "co2"])
def test_all_stop_after_so_many_rounds(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method = preset(name, schedule={"interval": 8})
    run = Simulated(TinyNet(), sgd, replace(method, max_idle_rounds=2), 3)
    take_steps(run, range(1, 12), set())
    assert not caplog.text
    with caplog.at_level(logging.WARNING), pytest.raises(NonFiniteError) as ended:
        take_steps(run, range(12, 60), {2})
    assert "cluster 2 took none of the last 8 inner steps" in caplog.text
    assert "all clusters stop after 2 such rounds in a row" in caplog.text
    assert "cluster 2 took none of the last 16 inner steps, since step" in str(ended.value)
    assert "for 2 rounds in a row" in str(ended.value)
    assert [loop.totals.skipped_steps > 0 for loop in run.loops] == [False, False, True]


def test_a_step_in_between_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[int, Any]] = []
    run = Simulated(TinyNet(), sgd, METHOD, 2)
    for loop in run.loops:
        loop._on_sync = lambda event, m=loop.transport.seat.cluster_id: events.append((m, event))
    for begin in (1, 10, 19, 28):  # of each 9 steps the first is taken
        take_steps(run, range(begin, begin + 1), set())
        take_steps(run, range(begin + 1, begin + 9), {1})
    assert run.loops[0].history == run.loops[1].history
    assert run.loops[1].totals.skipped_steps == 32 and run.loops[0].totals.skipped_steps == 0
    idle = [event["launched_step"] for m, event in events if m == 0 and "idle_in" in event]
    assert idle == [event["launched_step"] for m, event in events if m == 1 and "idle_in" in event]
    assert idle == [8, 16, 24, 32, 36]  # rounds that hold none of the steps 1, 10, 19, 28
    assert "since step 4" in caplog.text


@pytest.mark.parametrize(
    ("given", "interval", "allowed"), [(None, 100, 3), (None, 10, 5), (None, 1, 50), (0, 1, 0)]
)
def test_how_many_rounds_are_allowed(given: int | None, interval: int, allowed: int) -> None:
    clusters = {"num_clusters": 2} if given is None else {"num_clusters": 2, "max_idle_rounds": 0}
    block = {"preset": "diloco", "schedule": {"interval": interval}, "clusters": clusters}
    method: Method = load_config({"dsx": block}).method
    assert method.idle_rounds_allowed == allowed


def test_without_a_limit_nothing_stops(caplog: pytest.LogCaptureFixture) -> None:
    run = Simulated(TinyNet(), sgd, replace(METHOD, max_idle_rounds=0), 2)
    take_steps(run, range(1, 100), {0, 1})
    assert caplog.text.count("cluster 0, cluster 1 took none of the last 4 inner steps") == 2
    assert "all clusters stop" not in caplog.text


def test_a_fused_optimizer_is_called_for_a_step_that_is_skipped() -> None:
    model = TinyNet()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    adapter = TorchAdapter(model, optimizer, METHOD.fragments)
    seen: list[bool] = []
    adapter.on_inner_step(seen.append)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(mean_loss(model, 0, 1) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [False, True, False]
