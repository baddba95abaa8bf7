"""From a torch optimizer's `state_dict()` into DeepSpeed's, and a run across clusters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsx
from dsx.engines.deepspeed.masters import locate
from dsx.engines.deepspeed.parameters import stepping_optimizer, trained_parameters
from dsx.engines.deepspeed.torch_states import begin_from_torch
from tests.distributed import run_distributed
from tests.engines import engines
from tests.engines.engines import Kind, quiet
from tests.installed import needs
from tests.tiny import mean_loss

pytestmark = [needs("deepspeed"), pytest.mark.ci]

STEP = 3
KINDS = [
    Kind(0, "fp32", "two", "adamw", "diloco"),
    Kind(0, "bf16", "two", "adamw", "diloco"),
    Kind(1, "fp32", "two", "adamw", "diloco"),
    Kind(2, "bf16", "frozen", "adamw", "diloco"),
    Kind(1, "bf16", "two", "adamw", "diloco", zero=("round_robin",)),
]


def plain_run(kind: Kind) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train in plain torch; return the weights and the optimizer's state."""
    model = engines.OddNet(0)
    optimizer = engines.make_optimizer(kind.optimizer, engines.GROUPS[kind.groups](model))
    for step in range(1, STEP + 1):
        optimizer.zero_grad()
        mean_loss(model, 0, step).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return trained, copy.deepcopy(optimizer.state_dict())


def wrong(engine: Any, weights: dict[str, Tensor], saved: dict[str, Any]) -> list[str]:
    """Return what of masters, moments, steps and groups is not that of the plain run."""
    optimizer, found, numbers = stepping_optimizer(engine), [], iter(range(len(weights)))
    held = engines.OddNet(0)
    groups = engines.GROUPS["two" if len(saved["param_groups"]) == 2 else "frozen"](held)
    names = {id(p): n for n, p in held.named_parameters()}
    number_of = {names[id(p)]: next(numbers) for group in groups for p in group["params"]}
    for name, piece in locate(engine).pieces(trained_parameters(engine)).items():
        state, own = saved["state"][number_of[name]], optimizer.state[piece.master]
        places = {"master": (piece.view(), weights[name])}
        for key in ("exp_avg", "exp_avg_sq"):
            whole = own[key].view(-1)[piece.offset : piece.offset + piece.numel]
            places[key] = (whole, state[key])
        for key, (ours, theirs) in places.items():
            part = theirs.reshape(-1)[piece.start : piece.start + piece.numel]
            if not torch.equal(ours, part):
                found.append(f"{key} of {name}")
        if float(own["step"]) != float(state["step"]):
            found.append(f"step of {name}: {own['step']}")
    rates = [group["lr"] for group in optimizer.param_groups if group["params"]]
    if rates != [group["lr"] for group in saved["param_groups"]]:
        found.append(f"rates {rates}")
    if (engine.global_steps, engine.dsx.step) != (STEP, 0):
        found.append("counters")
    return found


def refusal(act: Any) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "taken"


def begin(kinds: list[Kind]) -> list[Any]:
    quiet()
    found: list[Any] = []
    for kind in kinds:
        weights, saved = plain_run(kind)
        engine = dsx.initialize(**engines.engine_arguments(kind))[0]
        if kind == KINDS[0]:
            saved["state"][0]["step"] += 1  # nothing is flattened, and each has steps of its own
        begin_from_torch(engine, engine.dsx, weights, saved, STEP, Path("there"))
        found.append(wrong(engine, weights, saved))
        for step in range(5):
            engines.train_step(engine, step)
        engine.dsx.close()
        engine.destroy()
    return found


def refused() -> dict[str, str]:
    quiet()
    kind = KINDS[2]
    weights, saved = plain_run(kind)
    engine = dsx.initialize(**engines.engine_arguments(kind))[0]
    cluster = engine.dsx.cluster_id

    def attempt(**changes: Any) -> str:
        given = {"weights": weights, "saved": saved, "step": STEP, **changes}
        return refusal(lambda: begin_from_torch(engine, engine.dsx, **given, source=Path("there")))

    one = {**saved, "param_groups": [{**saved["param_groups"][0]}]}
    states = {i: dict(state) for i, state in saved["state"].items()}
    states[0]["exp_avg"] = torch.zeros(3, 1)
    groups = [{**group, "momentum": 0.9} for group in saved["param_groups"]]
    uneven = {i: dict(state) for i, state in saved["state"].items()}
    uneven[0]["step"] = uneven[0]["step"] + 1  # of which one rank of a cluster holds nothing
    some = {i: {} if i == 0 else state for i, state in saved["state"].items()}
    moved = {i: {**s, "exp_avg": s["exp_avg"] + cluster} for i, s in saved["state"].items()}
    found = {
        "groups": attempt(saved=one),
        "shapes": attempt(saved={**saved, "state": states}),
        "settings": attempt(saved={**saved, "param_groups": groups}),
        "steps": attempt(saved={**saved, "state": uneven}),
        "none": attempt(saved={**saved, "state": some}),
    }
    assert not engine.global_steps and not any(
        moment.any()
        for own in stepping_optimizer(engine).state.values()
        for key, moment in own.items()
        if key != "step"
    )
    found["clusters"] = attempt(saved={**saved, "state": moved})
    found["late"] = attempt()
    engine.dsx.close()
    engine.destroy()
    stage_3 = engines.engine_arguments(kind._replace(stage=3))
    engine = dsx.initialize(**stage_3)[0]
    found["stage 3"] = attempt()
    engine.dsx.close()
    return found


def test_every_bit_of_it_is_taken() -> None:
    for found in run_distributed(begin, 4, KINDS, timeout_seconds=240):
        assert found == [[]] * len(KINDS)


def test_what_is_not_this_engines_is_refused() -> None:
    expected = {
        "groups": "holds an optimizer whose groups have",
        "shapes": "there holds exp_avg of",
        "settings": "holds an optimizer with the settings ['momentum'], which",
        "steps": "have been stepped differently often",
        "none": "holds no state of",
        "clusters": "have loaded different optimizer states",
        "late": "load it before the first step",
        "stage 3": "are not taken apart for zero_optimization.stage=3",
    }
    for found in run_distributed(refused, 4, timeout_seconds=240):
        assert {k: expected[k] in v for k, v in found.items()} == dict.fromkeys(expected, True), (
            found
        )
