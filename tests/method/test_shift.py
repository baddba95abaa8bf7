"""Shift: the published formula with codes, and what it leaves untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.config.schema import preset
from dsx.method.method import Method
from tests.compress.test_over_gloo import WideNet, adamw, loss
from tests.levels import by_default
from tests.method.test_eager_codes import ALL, int4
from tests.reference import Recipe, train_reference
from tests.simulated import Simulated

NUM_STEPS = 15
LATE = [{"steps": 0}, {"steps": 3}, {"outer_steps": 1}]
INT4 = {"type": "quantized", "small_wire": "fp32"}
PLAIN_MEAN = {"type": "sgd", "lr": 1.0}


def shift(num_clusters: int, late: dict[str, int], **overrides: Any) -> Method:
    return preset(
        "diloco", num_clusters,
        schedule={"interval": 4}, delay={"type": "shift", **late}, **overrides,
    )  # fmt: skip


@pytest.mark.parametrize("num_clusters", by_default([2, 3], 3))
@pytest.mark.parametrize("late", LATE, ids=str)
def test_codes_leave_what_they_lose_in_the_local_model(
    late: dict[str, int], num_clusters: int
) -> None:
    method = shift(num_clusters, late, compression=INT4)
    run = Simulated(WideNet(), adamw, method, num_clusters)
    for _ in range(NUM_STEPS):
        run.train_step(loss)
    recipe = Recipe(
        [ALL], 4, False, late.get("steps", 0), 1.0, "nesterov", 0.7, 0.9,
        delay="shift", outer_steps=late.get("outer_steps", 0), code=int4,
    )  # fmt: skip
    expected, _ = train_reference(WideNet(), adamw, loss, recipe, num_clusters, NUM_STEPS)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        assert max((ours[n] - theirs[n]).abs().max().item() for n in theirs) < 2e-5


@pytest.mark.parametrize("codes", [{"type": "dense"}, INT4], ids=str)
@pytest.mark.parametrize("late", LATE, ids=str)
def test_the_plain_mean_moves_no_mean_of_the_clusters(
    late: dict[str, int], codes: dict[str, str]
) -> None:
    """At an outer rate of 1 without momentum, whatever the delay and the codec are."""
    method = shift(3, late, compression=codes, outer_optimizer=PLAIN_MEAN)
    run, before = Simulated(WideNet(), adamw, method, 3), dict[int, Tensor]()
    for m, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
        optimizer.register_step_post_hook(
            lambda *_, m=m, model=model: before.__setitem__(m, vector(model))
        )
    num_moved = 0
    for _ in range(NUM_STEPS):
        run.train_step(loss)
        moves = torch.stack([vector(model) - before[m] for m, model in enumerate(run.models)])
        num_moved += moves.abs().max().item() > 1e-3
        assert moves.mean(0).abs().max() < 1e-6
    assert num_moved == 3 - late.get("outer_steps", 0)


@pytest.mark.parametrize("late", LATE, ids=str)
def test_one_cluster_alone_trains_as_without(late: dict[str, int]) -> None:
    """To the bit; with codes, too, since the mean is decoded from its own."""
    model = WideNet()
    optimizer = adamw(model)
    runs = [
        Simulated(WideNet(), adamw, shift(1, late, compression=c, outer_optimizer=PLAIN_MEAN), 1)
        for c in ({"type": "dense"}, INT4)
    ]
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()
        for run in runs:
            run.train_step(loss)
            assert torch.equal(vector(run.models[0]), vector(model))


def test_a_refused_round_stays_local() -> None:
    """Launched at step 4 with a NaN, due at step 7: nobody moves, and it goes with the next."""
    run = Simulated(WideNet(), adamw, shift(3, {"steps": 3}, compression=INT4), 3)
    anchor = torch.empty(0)
    for step in range(1, 13):
        for m, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, m, step).backward()
            optimizer.step()
        if step == 4:
            with torch.no_grad():
                next(iter(run.models[2].parameters()))[0, 0] = torch.nan
        before = [vector(model) for model in run.models]
        if step == 7:
            anchor = run.loops[0].state.anchor[0].clone()
        run.step()
        if step == 7:
            assert [loop.totals.refused for loop in run.loops] == [1, 1, 1]
            assert torch.equal(run.loops[0].state.anchor[0], anchor)
            for model, theirs in zip(run.models[:2], before, strict=False):
                assert torch.equal(vector(model), theirs)
            run.optimizers[2].state.clear()  # Adam's moments are not finite any more
    assert [loop.totals.refused for loop in run.loops] == [1, 1, 1]
    assert torch.isfinite(torch.stack([vector(model) for model in run.models])).all()
    assert not torch.equal(run.loops[0].state.anchor[0], anchor)


def test_a_whole_round_and_steps_are_two_delays() -> None:
    with pytest.raises(ValueError, match=r"delay.steps=2 and delay.outer_steps=1"):
        shift(2, {"steps": 2, "outer_steps": 1}).validate()


def test_a_residual_beside_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"error_feedback='fp32'.*'shift'"):
        shift(2, {"steps": 1}, compression={**INT4, "error_feedback": "fp32"}).validate()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
