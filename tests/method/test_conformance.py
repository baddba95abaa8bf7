"""What every method has to satisfy, over the table in tests/tiny.py."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dsx.method.choices import PRESETS
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from tests.held_memory import held_bytes, scratch_bytes
from tests.levels import by_default
from tests.reference import train_reference
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, CASES, WIDTH, TinyNet, mean_loss

NUM_STEPS = 25
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
GOLDEN = Path(__file__).parents[1] / "golden"


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def new_run(name: str, num_clusters: int) -> Simulated:
    return Simulated(TinyNet(), adamw, ALL_CASES[name].method(num_clusters), num_clusters)


@dataclass
class Trained:
    """A finished run, and what was seen on its way; only to be looked at."""

    run: Simulated
    bytes_at_start: int
    losses: list[list[float]]
    steps_that_separate: list[int]


@functools.cache
def trained(name: str, num_clusters: int) -> Trained:
    """Train once for all tests."""
    run = new_run(name, num_clusters)
    state = run.loops[0].state
    seen = Trained(run, held_bytes(state) + scratch_bytes(state), [], [])
    for step in range(1, NUM_STEPS + 1):
        seen.losses.append(run.train_step(mean_loss))
        if not all(are_alike(run.loops[0], loop) for loop in run.loops[1:]):
            seen.steps_that_separate.append(step)
    return seen


def are_alike(first: OuterLoop, other: OuterLoop) -> bool:
    anchors = zip(first.state.anchor, other.state.anchor, strict=True)
    return first.history == other.history and all(torch.equal(a, b) for a, b in anchors)


def test_every_preset_is_in_the_table() -> None:
    assert list(CASES) == list(PRESETS)
    assert all(case.preset == name for name, case in CASES.items())


@pytest.mark.parametrize("num_clusters", by_default([1, 2, 3, 5], 3))
@pytest.mark.parametrize("name", ALL_CASES)
def test_equals_the_reference(name: str, num_clusters: int) -> None:
    compare_with_the_reference(name, trained(name, num_clusters).run, adamw)


@pytest.mark.ci
@pytest.mark.parametrize("num_clusters", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ALL_CASES)
def test_equals_the_reference_with_sgd(name: str, num_clusters: int) -> None:
    run = Simulated(TinyNet(), sgd, ALL_CASES[name].method(num_clusters), num_clusters)
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
    compare_with_the_reference(name, run, sgd)


def compare_with_the_reference(name: str, run: Simulated, make_optimizer: MakeOptimizer) -> None:
    recipe, num_clusters = ALL_CASES[name].recipe, run.num_clusters
    atol = ALL_CASES[name].atol
    expected, anchor = train_reference(
        TinyNet(), make_optimizer, mean_loss, recipe, num_clusters, NUM_STEPS
    )
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=atol)
    assert min(run.loops[0].history.rounds) >= 3
    for fragment, names in enumerate(recipe.fragments if anchor else ()):
        flat = torch.cat([anchor[n].reshape(-1) for n in names])
        ours_flat = run.loops[0].state.anchor[fragment]
        torch.testing.assert_close(ours_flat, flat, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ALL_CASES)
def test_goes_on_after_finish_as_the_reference(name: str) -> None:
    """At a launch, right behind one, between two and twice in a row."""
    finished_at, case = (5, 8, 9, 14, 15), ALL_CASES[name]
    run = new_run(name, 3)
    for step in range(1, NUM_STEPS + 1):
        run.train_step(mean_loss)
        if step in finished_at:
            run.finish()
            assert not any(isinstance(t, Transfer) for loop in run.loops for t in loop.in_flight)
        for loop in run.loops[1:]:
            assert loop.history == run.loops[0].history
            pairs = zip(run.loops[0].state.anchor, loop.state.anchor, strict=True)
            assert all(torch.equal(first, other) for first, other in pairs)
    expected, _ = train_reference(
        TinyNet(), adamw, mean_loss, case.recipe, 3, NUM_STEPS, finished_at=finished_at
    )
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=case.atol)


@pytest.mark.parametrize("num_clusters", by_default([2, 3, 5], 3))
@pytest.mark.parametrize("name", ALL_CASES)
def test_anchors_are_bit_identical_at_every_step(name: str, num_clusters: int) -> None:
    assert trained(name, num_clusters).steps_that_separate == []


def test_a_cluster_that_goes_another_way_is_seen() -> None:
    """So that the test above proves something."""
    run = new_run("diloco", 2)
    run.train_step(mean_loss)
    assert are_alike(*run.loops)
    run.loops[1].state.anchor[0][3] += 1e-6
    assert not are_alike(*run.loops)


@pytest.mark.parametrize("name", by_default(ALL_CASES, *CASES))
def test_is_deterministic(name: str) -> None:
    first, second = trained(name, 3), new_run(name, 3)
    for losses in first.losses:
        assert losses == second.train_step(mean_loss)
    for ours, theirs in zip(first.run.parameters(), second.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("name", ALL_CASES)
def test_state_takes_what_the_method_declares(name: str) -> None:
    case = ALL_CASES[name]
    run, before = trained(name, 3).run, trained(name, 3).bytes_at_start
    loop = run.loops[0]
    numel = sum(p.numel() for p in run.models[0].parameters())
    num_fragments = len(loop.adapter.fragments)
    longest = max(f.numel for f in loop.adapter.fragments)
    num_tensors = [len(parameters) for parameters in loop.adapter.fragment_parameters]
    per_element = case.recipe.penalty == "element"
    per_tensor = case.recipe.penalty == "tensor"
    buffers = case.method().max_in_flight
    # what was sent last is kept beside what travels, unless launches take the memory of means
    expected = (case.vectors + (not loop.state.passes_on)) * numel
    sizes = numel if per_element else sum(num_tensors) if per_tensor else 0
    expected += (2 + 2 * buffers) * sizes
    if case.preset == "dilocox":
        expected += num_fragments * 2 * buffers * (6 + 1)  # sideband: a spectrum and a norm
    if run.method.schedule.uses_norms:
        expected += num_fragments * 2 * buffers  # a norm in the sideband
    held, scratch = held_bytes(loop.state), scratch_bytes(loop.state)
    assert held == 4 * expected
    assert scratch <= 16 * longest
    assert held + scratch - before <= 4 * longest * 4  # scratch, on first use; nothing else


class Constant(torch.nn.Module):
    """Four layers whose gradients are constants of the layer and the cluster: 1, 2, 3, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for parameter in self.parameters():
            parameter.data.zero_()


def constant_loss(model: torch.nn.Module, cluster: int, step: int) -> torch.Tensor:
    total = torch.zeros(())
    for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
        slope = float((index + 1) * (cluster + 1))
        total = total + slope * (layer.weight.sum() + layer.bias.sum())
    return total


def trajectory(name: str) -> dict[str, object]:
    """One element of every layer, by cluster and step, and the transfers of cluster 0."""
    events: list[list[int]] = []
    case = CASES[name]
    run = Simulated(
        Constant(), lambda m: torch.optim.SGD(m.parameters(), lr=0.01), case.method(2), 2
    )
    run.loops[0]._on_sync = lambda e: events.append(
        [e["fragment"], e["launched_step"], e["applied_step"]]
    )
    steps: list[list[list[float]]] = []
    for _ in range(16):
        run.train_step(constant_loss)
        steps.append(
            [
                [round(layer.weight[0, 0].item(), 7) for layer in model.layers]  # type: ignore
                for model in run.models
            ]
        )
    return {
        "method": case.axes(),
        "transfers [fragment, launched, applied]": events,
        "parameters by step, cluster, layer": steps,
    }


@pytest.mark.parametrize("name", CASES)
def test_golden_trajectory(name: str) -> None:
    """Constant gradients give a trajectory one can follow by hand.

    `DSX_WRITE_GOLDEN=1 pytest tests/method/test_conformance.py` writes the files anew; review the
    difference like code.
    """
    path = GOLDEN / f"{name}.json"
    ours = json.loads(json.dumps(trajectory(name)))
    if os.environ.get("DSX_WRITE_GOLDEN") == "1":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(readable(ours))
    expected = json.loads(path.read_text())
    assert ours["method"] == expected["method"]
    key = "transfers [fragment, launched, applied]"
    assert ours[key] == expected[key]
    key = "parameters by step, cluster, layer"
    torch.testing.assert_close(
        torch.tensor(ours[key]), torch.tensor(expected[key]), rtol=0, atol=2e-6
    )


def readable(golden: dict[str, object]) -> str:
    """JSON with one step, or one axis, per line."""
    lines = []
    for key, value in golden.items():
        if isinstance(value, dict):
            rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n}")
        else:
            rows = [f"  {json.dumps(row)}" for row in value]  # type: ignore[attr-defined]
            lines.append(f"{json.dumps(key)}: [\n" + ",\n".join(rows) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"
