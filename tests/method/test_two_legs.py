"""Few bits both ways under every kind of delay; owners keep what is lost of the means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.config.schema import preset
from tests.compress.test_over_gloo import WideNet, adamw, loss
from tests.compress.wire import reference
from tests.method.test_eager_codes import ALL
from tests.reference import Recipe, train_reference
from tests.simulated import Simulated

NUM_STEPS = 12
RULE = ("nesterov", 0.4, 0.5)
OUTER = {"type": "nesterov", "lr": 0.4, "momentum": 0.5}
KEPT = {"error_feedback": "fp32"}  # elsewhere it is in the local model
DELAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Recipe]] = {
    "shift": (
        {"type": "shift", "steps": 2}, {},
        Recipe([ALL], 3, False, 2, 1.0, *RULE, delay="shift", outer_steps=0),
    ),
    "shift, a round": (
        {"type": "shift", "outer_steps": 1}, {},
        Recipe([ALL], 3, False, 0, 1.0, *RULE, delay="shift", outer_steps=1),
    ),
    "blocking": ({"type": "blocking"}, KEPT, Recipe([ALL], 3, False, 0, 1.0, *RULE)),
    "streaming": (
        {"type": "streaming", "steps": 2, "alpha": 0.3}, KEPT,
        Recipe([ALL], 3, False, 2, 0.3, *RULE),
    ),
    "one_step": (
        {"type": "one_step"}, KEPT, Recipe([ALL], 3, False, 0, 1.0, *RULE, delay="delayed")
    ),
    "eager": (
        {"type": "eager"}, KEPT, Recipe([ALL], 3, False, 0, 1.0, *RULE, delay="eager")
    ),
}  # fmt: skip


def decoded(wire: str, group_size: int, x: Tensor) -> Tensor:
    """What all decode of a matrix; vectors as they are."""
    if x.dim() < 2:
        return x
    flat = x.reshape(-1)
    return reference.message(wire, flat, group_size)[1].view(x.shape)


@pytest.mark.parametrize(
    ("delay", "wire"),
    [*((delay, "2bit") for delay in DELAYS), ("shift", "3bit"), ("shift", "1bit")],
)
def test_two_legs_are_the_formula(delay: str, wire: str) -> None:
    """q = Q(D), y = mean of q + e, Q(y) is applied, e = y - Q(y): in plain torch, four clusters."""
    own, feedback, recipe = DELAYS[delay]
    codes = {"type": "quantized", "wire": wire, "mean_wire": wire, "small_wire": "fp32"}
    method = preset(
        "diloco", 4, schedule={"interval": 3}, delay=own, outer_optimizer=OUTER,
        compression=codes | feedback,
    )  # fmt: skip
    run = Simulated(WideNet(), adamw, method, 4)
    for _ in range(NUM_STEPS):
        run.train_step(loss)
    recipe = Recipe(
        **{
            **recipe.__dict__,
            "code": lambda x: decoded(wire, 64, x),
            "feedback": bool(feedback),
            "code_of_mean": lambda x: decoded(wire, 256 if wire == "1bit" else 64, x),
        }
    )
    expected, _ = train_reference(WideNet(), adamw, loss, recipe, 4, NUM_STEPS)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        assert max((ours[n] - theirs[n]).abs().max().item() for n in theirs) < 2e-5
    for loop in run.loops[1:]:
        assert torch.equal(loop.state.anchor[0], run.loops[0].state.anchor[0])
