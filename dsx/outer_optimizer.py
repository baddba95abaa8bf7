"""Outer optimizers: one step of the anchor along the averaged pseudo-gradient.

Source: DiLoCo (arXiv:2311.08105, Alg. 1), SlowMo (arXiv:1910.00643, Alg. 1), FedAdam
(arXiv:2003.00295, Alg. 2). The pseudo-gradient has descent sign, `D = anchor - local`, so every
rule subtracts. `lr` is eta, `momentum` is mu; buffers start at 0.

Invariants: all math is elementwise and uses separate multiplications and additions, never the
fused `alpha=` forms: those round differently from one CPU to the next, and anchors must stay
bit-identical across clusters. `step` works in place and allocates nothing.

Deviation: SlowMo scales by the inner learning rate gamma; as in the paper's own experiments at a
constant rate we leave it out by default (the two are then the same rule) and offer `scale_by_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class OuterContext:
    """What a step may need beyond the tensors: outer round (from 1), inner rate, scratch space."""

    round: int
    inner_lr: float
    scratch: Tensor


class OuterOptimizer(Protocol):
    """A rule that moves the anchor in place; `slots` names its fp32 `[numel]` buffers."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state buffers, each zero at the start."""
        ...

    def validate(self) -> None:
        """Raise ValueError for a value outside the rule's range."""
        ...

    def step(
        self, anchor: Tensor, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext
    ) -> None:
        """Move `anchor` and `slots` in place along `grad`, which is used up as work space."""
        ...


@dataclass(frozen=True)
class SGD:
    """`anchor -= lr * D`; LocalSGD / FedAvg is `lr=1` (the anchor becomes the mean)."""

    lr: float

    @property
    def slots(self) -> tuple[str, ...]:
        """No state."""
        return ()

    def validate(self) -> None:
        """Require a positive rate."""
        _require_positive("lr", self.lr)

    def step(
        self, anchor: Tensor, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext
    ) -> None:
        """Move `anchor` in place."""
        anchor.sub_(grad.mul_(self.lr))


@dataclass(frozen=True)
class Momentum:
    """Heavy ball (SlowMo, CO2): `buf = mu*buf + D; anchor -= lr * buf`.

    `scale_by_lr`: SlowMo's own form, `buf = mu*buf + D/gamma; anchor -= lr*gamma*buf` with the
    inner learning rate gamma of the step at which the mean is applied.
    """

    lr: float
    momentum: float
    scale_by_lr: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """One buffer."""
        return ("momentum",)

    def validate(self) -> None:
        """Require a positive rate and 0 <= momentum < 1."""
        _require_positive("lr", self.lr)
        _require_fraction("momentum", self.momentum)

    def step(
        self, anchor: Tensor, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext
    ) -> None:
        """Move `anchor` and the buffer in place."""
        lr = self.lr
        if self.scale_by_lr:
            if context.inner_lr <= 0:
                raise ValueError(
                    f"outer_optimizer.scale_by_lr divides by the inner learning rate, which is "
                    f"{context.inner_lr} at outer round {context.round}; keep it above 0 at every "
                    "sync or set scale_by_lr to false"
                )
            grad.div_(context.inner_lr)
            lr *= context.inner_lr
        buffer = slots["momentum"].mul_(self.momentum).add_(grad)
        anchor.sub_(torch.mul(buffer, lr, out=grad))


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's rule: `buf = mu*buf + D; anchor -= lr * (D + mu*buf)`, as `torch.optim.SGD`."""

    lr: float
    momentum: float

    @property
    def slots(self) -> tuple[str, ...]:
        """One buffer."""
        return ("momentum",)

    def validate(self) -> None:
        """Require a positive rate and 0 <= momentum < 1."""
        _require_positive("lr", self.lr)
        _require_fraction("momentum", self.momentum)

    def step(
        self, anchor: Tensor, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext
    ) -> None:
        """Move `anchor` and the buffer in place."""
        buffer = slots["momentum"].mul_(self.momentum).add_(grad)
        grad.add_(torch.mul(buffer, self.momentum, out=context.scratch))
        anchor.sub_(grad.mul_(self.lr))


@dataclass(frozen=True)
class Adam:
    """FedAdam with bias correction: the standard Adam update with gradient D."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def validate(self) -> None:
        """Require positive lr and eps, and both betas in [0, 1)."""
        _require_positive("lr", self.lr)
        _require_positive("eps", self.eps)
        for index, beta in enumerate(self.betas):
            _require_fraction(f"betas[{index}]", beta)

    def step(
        self, anchor: Tensor, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext
    ) -> None:
        """Move `anchor` and both moments in place."""
        beta1, beta2 = self.betas
        scratch = context.scratch
        mean = slots["exp_avg"].mul_(beta1)
        mean.add_(torch.mul(grad, 1 - beta1, out=scratch))
        square = slots["exp_avg_sq"].mul_(beta2)
        square.add_(torch.mul(grad, grad, out=scratch).mul_(1 - beta2))
        root = torch.sqrt(square, out=scratch).div_(math.sqrt(1 - beta2**context.round))
        update = torch.mul(mean, self.lr / (1 - beta1**context.round), out=grad)
        anchor.sub_(update.div_(root.add_(self.eps)))


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"outer_optimizer.{name}={value} must be a finite number above 0")


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"outer_optimizer.{name}={value} must be at least 0 and below 1")
