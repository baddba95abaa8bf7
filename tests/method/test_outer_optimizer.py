"""Outer rules against torch.optim, and their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsx.core.types import Fragment, ParameterShape, Slot
from dsx.method.outer_optimizer import SGD, Adam, Momentum, Nesterov, OuterContext, OuterOptimizer
from dsx.outer.per_tensor import ShardedTensors

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


def context(round: int, inner_lr: float = 0.1) -> OuterContext:
    tensors = [ParameterShape("a", (2, 2)), ParameterShape("b", (3,))]
    fragment = Fragment(0, 0, (Slot("a", (2, 2), 0), Slot("b", (3,), 4)))
    fold = torch.empty(7)
    whole = ShardedTensors(fragment, tensors, lambda x: x, lambda: fold, torch.device("cpu"))
    return OuterContext(round, inner_lr, torch.empty(7), whole)


def run(rule: OuterOptimizer, grads: list[torch.Tensor], inner_lr: float = 0.1) -> torch.Tensor:
    anchor = torch.linspace(-1, 1, 7)
    slots = {name: torch.zeros(7) for name in rule.slots}
    for k, grad in enumerate(grads, start=1):
        anchor.sub_(rule.update(grad.clone(), slots, context(k, inner_lr)))
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
        anchor.sub_(rule.update(grad.clone(), slots, context(k, gamma)))
        buffer = 0.5 * buffer + grad / gamma
        expected = expected - gamma * buffer
    torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"scale_by_lr divides by the inner learning rate"):
        rule.update(grad, slots, context(4, 0.0))


@pytest.mark.parametrize("make", [Momentum, Nesterov])
def test_the_clip_clamps_what_is_applied_and_not_the_buffer(make: Any) -> None:
    mu, eta, phi = 0.8, 0.3, 0.7
    rule = make(lr=eta, momentum=mu, clip=phi)
    anchor, buffer, slots = torch.zeros(7), torch.zeros(7), {"momentum": torch.zeros(7)}
    expected = torch.zeros(7)
    for k, grad in enumerate(gradients(5), start=1):
        anchor.sub_(rule.update(grad.clone(), slots, context(k)))
        buffer = mu * buffer + grad
        direction = buffer if make is Momentum else grad + mu * buffer
        expected = expected - eta * direction.clamp(-phi, phi)
    torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(slots["momentum"], buffer, rtol=0, atol=1e-6)
    assert buffer.abs().max() > phi  # otherwise nothing was clipped
    unclipped = run(make(lr=eta, momentum=mu), gradients(5)) - torch.linspace(-1, 1, 7)
    assert (unclipped - anchor).abs().max() > 0.1


@pytest.mark.parametrize("make", [Momentum, Nesterov])
def test_the_clip_as_a_multiple_of_each_tensors_rms(make: Any) -> None:
    rule = make(lr=1.0, momentum=0.0, clip=1.1, clip_unit="rms")
    (grad,) = gradients(1)
    update = rule.update(grad.clone(), {"momentum": torch.zeros(7)}, context(1))
    expected = grad.clone()
    for part in (slice(0, 4), slice(4, 7)):
        phi = 1.1 * grad[part].square().mean().sqrt().item()
        expected[part] = grad[part].clamp(-phi, phi)
    torch.testing.assert_close(update, expected, rtol=0, atol=1e-6)
    assert not torch.equal(update, grad)
