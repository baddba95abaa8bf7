"""Outer rules against torch.optim, and their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsx.outer_optimizer import SGD, Adam, Momentum, Nesterov, OuterContext, OuterOptimizer

RULES: list[tuple[OuterOptimizer, Callable[[Any], torch.optim.Optimizer]]] = [
    (SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    (Momentum(lr=0.3, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
    (
        Nesterov(lr=0.3, momentum=0.8),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True),
    ),
    (
        Adam(lr=0.01, betas=(0.8, 0.9), eps=1e-6),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-6),
    ),
]


def run(rule: OuterOptimizer, grads: list[torch.Tensor], inner_lr: float = 0.1) -> torch.Tensor:
    anchor = torch.linspace(-1, 1, 7)
    slots = {name: torch.zeros(7) for name in rule.slots}
    for k, grad in enumerate(grads, start=1):
        rule.step(anchor, grad.clone(), slots, OuterContext(k, inner_lr, torch.empty(7)))
    return anchor


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("rule", "make"), RULES, ids=lambda r: type(r).__name__)
def test_equals_torch(rule: OuterOptimizer, make: Callable[[Any], Any]) -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = make([parameter])
    for grad in gradients(6):
        parameter.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(run(rule, gradients(6)), parameter.detach(), rtol=0, atol=1e-6)


def test_nesterov_without_momentum_is_sgd() -> None:
    assert torch.equal(run(Nesterov(0.3, 0.0), gradients(4)), run(SGD(0.3), gradients(4)))


def test_scaling_by_the_inner_rate_changes_nothing_at_a_constant_rate() -> None:
    plain = run(Momentum(0.3, 0.5), gradients(5))
    scaled = run(Momentum(0.3, 0.5, scale_by_lr=True), gradients(5), inner_lr=0.02)
    torch.testing.assert_close(plain, scaled, rtol=0, atol=1e-6)


def test_scaling_by_a_varying_inner_rate_is_slowmos_rule() -> None:
    rule = Momentum(lr=1.0, momentum=0.5, scale_by_lr=True)
    anchor, buffer, slots = torch.zeros(7), torch.zeros(7), {"momentum": torch.zeros(7)}
    expected = torch.zeros(7)
    for k, (grad, gamma) in enumerate(zip(gradients(3), (0.1, 0.05, 0.01), strict=True), start=1):
        rule.step(anchor, grad.clone(), slots, OuterContext(k, gamma, torch.empty(7)))
        buffer = 0.5 * buffer + grad / gamma
        expected = expected - gamma * buffer
    torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"scale_by_lr divides by the inner learning rate"):
        rule.step(anchor, grad, slots, OuterContext(4, 0.0, torch.empty(7)))
