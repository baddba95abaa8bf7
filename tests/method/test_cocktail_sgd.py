"""CocktailSGD: what is not sent stays in the local parameters, in plain torch and by identities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.config.schema import preset
from dsx.outer.transfer import Transfer
from tests.compress.test_over_gloo import WideNet, adamw, loss
from tests.compress.test_random_top_k import decoded, picked
from tests.levels import by_default
from tests.method.test_eager_codes import ALL, int4
from tests.reference import Recipe, train_reference
from tests.simulated import Simulated

CODES = {"random_ratio": 0.25, "top_k_ratio": 0.2, "chunk": 128, "group_size": 32}


def trained(name: str, num_clusters: int, num_steps: int = 10, **overrides: Any) -> Simulated:
    run = Simulated(WideNet(), adamw, preset(name, num_clusters, **overrides), num_clusters)
    for _ in range(num_steps):
        run.train_step(loss)
    return run


@pytest.mark.parametrize("num_clusters", by_default([2, 3], 3))
@pytest.mark.parametrize("outer_steps", [0, 1])
def test_codes_leave_what_they_lose_in_the_local_model(outer_steps: int, num_clusters: int) -> None:
    """The published rule, step by step: out with one's own codes, in with everybody's mean."""
    run = trained(
        "cocktail_sgd", num_clusters,
        compression={"type": "quantized", "small_wire": "fp32"},
        delay={"outer_steps": outer_steps}, schedule={"interval": 2},
    )  # fmt: skip
    recipe = Recipe(
        [ALL], 2, False, 0, 1.0, "sgd", 1.0,
        delay="shift", outer_steps=outer_steps, code=int4,
    )  # fmt: skip
    expected, _ = train_reference(WideNet(), adamw, loss, recipe, num_clusters, 10)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        assert max((ours[n] - theirs[n]).abs().max().item() for n in theirs) < 2e-5


def test_the_preset_is_the_published_algorithm() -> None:
    """Flat vectors, random positions, top-k and int4, written out for two clusters."""
    method = preset("cocktail_sgd", 2, compression={**CODES, "small_wire": "fp32"})
    run, events, unsent_norms = Simulated(WideNet(), adamw, method, 2), list[Any](), list[float]()
    run.loops[0]._on_sync = events.append
    for _ in range(10):
        run.train_step(loss)
    models = [WideNet() for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    anchor = flat(models[0])
    late: list[tuple[Tensor, Tensor]] = []
    for step in range(1, 11):
        for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, m, step).backward()
            optimizer.step()
        own = late[0] if late else (torch.zeros_like(anchor),) * 2
        unsent = [anchor - flat(model) - s for model, s in zip(models, own, strict=True)]
        if late:
            anchor = anchor - (own[0] + own[1]) / 2
        for model, distance in zip(models, unsent, strict=True):
            write(model, anchor - distance)
        late = [(sent_of(unsent[0], step), sent_of(unsent[1], step))]
        unsent_norms.append((unsent[0] - late[0][0]).norm().item())
    assert [float(event["unsent_norm"]) for event in events] == pytest.approx(unsent_norms[1:])
    torch.testing.assert_close(run.loops[0].state.anchor[0], anchor, rtol=0, atol=2e-6)
    for ours, theirs in zip(run.models, models, strict=True):
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("outer_steps", [0, 1])
def test_a_record_says_how_much_is_neither_sent_nor_under_way(outer_steps: int) -> None:
    """What a local model has beyond the anchor and beyond what the next means will bring of it."""
    delay, compression = {"outer_steps": outer_steps}, {**CODES, "small_wire": "fp32"}
    method = preset("cocktail_sgd", 2, delay=delay, compression=compression)
    run = Simulated(WideNet(), adamw, method, 2)
    loop, events = run.loops[0], list[Any]()
    loop._on_sync = events.append
    told: list[tuple[float, float]] = []
    for step in range(1, 9):
        run.train_step(loss)
        if step <= outer_steps:
            continue  # nothing has come yet
        ahead = loop.state.anchor[0] - flat(run.models[0])
        under_way = [t.buffers.kept for t in loop.in_flight if isinstance(t, Transfer)]
        assert len(under_way) == outer_steps
        told.append((float(events[-1]["unsent_norm"]), (ahead - sum(under_way)).norm().item()))
    assert len(told) == len(events) == 8 - outer_steps
    for ours, expected in told:
        assert ours == pytest.approx(expected, rel=1e-4)
    assert min(ours for ours, _ in told) > 1e-3


@pytest.mark.parametrize("outer_steps", [0, 1])
def test_dense_messages_leave_nothing_unsent(outer_steps: int) -> None:
    delay, dense = {"outer_steps": outer_steps}, {"type": "dense"}
    run = Simulated(WideNet(), adamw, preset("cocktail_sgd", 2, delay=delay, compression=dense), 2)
    events: list[Any] = []
    run.loops[0]._on_sync = events.append
    for _ in range(4):
        run.train_step(loss)
    norms = [float(event["unsent_norm"]) for event in events]
    assert len(norms) == 4 - outer_steps and max(norms) < 1e-6


def in_order(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """As in the fragment: what is coded, then the vectors."""
    return sorted(model.parameters(), key=lambda p: p.dim() < 2)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in in_order(model)])


def write(model: torch.nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(values, in_order(model))


def sent_of(x: Tensor, round: int) -> Tensor:
    """Three matrices are one run; their biases go as they are."""
    out, numel = x.clone(), 3 * 48 * 48
    positions = picked(numel, numel // 4, 0, round)
    out[:numel] = 0
    out[positions] = decoded(x[positions], 0.2, 128, 32)
    return out


@pytest.mark.parametrize("outer_steps", [0, 1])
def test_one_cluster_alone_loses_nothing(outer_steps: int) -> None:
    """What it has not sent it still has: the codes change no step of it."""
    delay = {"outer_steps": outer_steps}
    (ours,) = trained("cocktail_sgd", 1, compression=CODES, delay=delay).parameters()
    (exact,) = trained("local_sgd", 1, schedule={"interval": 1}).parameters()
    assert max((ours[n] - exact[n]).abs().max().item() for n in exact) < 2e-6


def test_residuals_elsewhere_send_the_same_where_gradients_are_the_same() -> None:
    """With constant gradients, error feedback in the local model is that of EF-SGD."""

    def constant(model: torch.nn.Module, cluster: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(cluster)
        return sum(
            ((p * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters()),
            torch.zeros(()),
        )

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.125)

    anchors: list[Tensor] = []
    for delay, feedback in (
        ({"type": "shift", "outer_steps": 0}, "none"),
        ({"type": "blocking"}, "fp32"),
    ):
        codes = {**CODES, "error_feedback": feedback, "small_wire": "fp32"}
        method = preset("cocktail_sgd", 2, delay=delay, compression=codes)
        run = Simulated(WideNet(), sgd, method, 2)
        for _ in range(12):
            run.train_step(constant)
        anchors.append(run.loops[0].state.anchor[0])
    torch.testing.assert_close(anchors[0], anchors[1], rtol=0, atol=1e-4)


def inner_step_of_all(run: Simulated, step: int) -> None:
    """Train a step of every cluster; in the third one the last cluster gets a NaN."""
    for m, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
        optimizer.zero_grad()
        loss(model, m, step).backward()
        optimizer.step()
    if step == 3:
        with torch.no_grad():
            next(iter(run.models[2].parameters()))[0, 0] = torch.nan


@pytest.mark.parametrize("outer_steps", [0, 1])
def test_a_refused_round_is_sent_again(outer_steps: int) -> None:
    """Nobody has applied it, so all of it stays in the local model, and goes with later rounds."""
    delay = {"outer_steps": outer_steps}
    run = Simulated(WideNet(), adamw, preset("cocktail_sgd", 3, delay=delay, compression=CODES), 3)
    for step in range(1, 8):
        inner_step_of_all(run, step)
        anchor, local = run.loops[0].state.anchor[0].clone(), flat(run.models[0])
        run.step()
        if step == 3 + outer_steps:
            assert [loop.totals.refused for loop in run.loops] == [1, 1, 1]
            assert torch.equal(run.loops[0].state.anchor[0], anchor)
            torch.testing.assert_close(flat(run.models[0]), local, rtol=0, atol=1e-7)
            assert torch.equal(flat(run.models[2]), anchor)
            with torch.no_grad():  # Adam's moments are not finite any more
                run.optimizers[2].state.clear()
    anchors = [loop.state.anchor[0] for loop in run.loops]
    assert all(torch.equal(other, anchors[0]) for other in anchors)
    assert [loop.totals.refused for loop in run.loops] == [1 + outer_steps] * 3
    assert all(torch.isfinite(flat(model)).all() for model in run.models)


def test_a_round_refused_in_a_drain_stays_in_the_local_model() -> None:
    """Training may go on behind a drain, and sends it then; the cluster at fault has lost its."""
    delay = {"outer_steps": 1}
    run = Simulated(WideNet(), adamw, preset("cocktail_sgd", 3, delay=delay, compression=CODES), 3)
    for step in range(1, 4):
        inner_step_of_all(run, step)
        run.step()
    anchor, local = run.loops[0].state.anchor[0].clone(), flat(run.models[0])
    drains = [loop.draining() for loop in run.loops]
    for _ in zip(*drains, strict=True):
        pass
    assert [loop.totals.refused for loop in run.loops] == [1, 1, 1]
    assert torch.equal(run.loops[0].state.anchor[0], anchor)
    torch.testing.assert_close(flat(run.models[0]), local, rtol=0, atol=1e-7)
    assert torch.equal(flat(run.models[2]), anchor)
