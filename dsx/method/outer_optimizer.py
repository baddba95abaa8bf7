"""Outer optimizers: one step of the anchor along the averaged pseudo-gradient.

Source: DiLoCo (arXiv:2311.08105, Alg. 1), SlowMo (arXiv:1910.00643, Alg. 1), CO2
(arXiv:2401.16265, Alg. 1, l. 12-13, the clip), FedAdam (arXiv:2003.00295, Alg. 2). The
pseudo-gradient has descent sign, `D = anchor - local`, so every rule subtracts. `lr` is eta,
`momentum` is mu; buffers start at 0.

Invariants: all math is elementwise and uses separate multiplications and additions, never the
fused `alpha=` forms: those round differently from one CPU to the next, and anchors must stay
bit-identical across clusters. `update` works in place and allocates nothing.

Deviations: SlowMo scales by the inner learning rate gamma; as in the paper's own experiments at a
constant rate we leave it out by default (the two are then the same rule) and offer `scale_by_lr`.
The clip clamps what is applied, never the buffer, as CO2's algorithm says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dsx.core.checks import require_choice
from dsx.core.types import PerTensor

ClipUnit = Literal["absolute", "rms"]


@dataclass(frozen=True)
class OuterContext:
    """What an update may need beyond the tensors.

    `round` counts outer steps from 1, `inner_lr` is the inner learning rate, `scratch` free work
    space `[numel]`, `per_tensor` the norms of single tensors.
    """

    round: int
    inner_lr: float
    scratch: Tensor
    per_tensor: PerTensor


class OuterOptimizer(Protocol):
    """A rule that turns a pseudo-gradient into an update; `slots` names its fp32 buffers."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state buffers `[numel]`, each zero at the start."""
        ...

    @property
    def keeps_anchor(self) -> bool:
        """Whether there is an anchor to move at all."""
        ...

    @property
    def is_linear(self) -> bool:
        """Whether the update of a sum is the sum of the updates: eager overlap splits it so."""
        ...

    @property
    def has_momentum(self) -> bool:
        """Whether a staleness penalty on the gradient makes sense."""
        ...

    def validate(self) -> None:
        """Raise ValueError for a value outside the rule's range."""
        ...

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return what is to be subtracted from the anchor, in place of `grad`; moves `slots`."""
        ...


@dataclass(frozen=True)
class NoOuterStep:
    """Parameters are averaged in place: no anchor, no state (DreamDDP, parameter averaging)."""

    slots = ()
    keeps_anchor = False
    is_linear = False
    has_momentum = False

    def validate(self) -> None:
        """Nothing to check."""

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Refuse: there is no anchor to update."""
        raise AssertionError("no outer step is taken where there is no anchor")


@dataclass(frozen=True)
class SGD:
    """`anchor -= lr * D`; LocalSGD / FedAvg is `lr=1` (the anchor becomes the mean)."""

    lr: float

    slots = ()
    keeps_anchor = True
    is_linear = True
    has_momentum = False

    def validate(self) -> None:
        """Require a positive rate."""
        _require_positive("lr", self.lr)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return `lr * D`, in place of `grad`."""
        return grad.mul_(self.lr)


@dataclass(frozen=True)
class Momentum:
    """Heavy ball (SlowMo, CO2): `buf = mu*buf + D; anchor -= lr * buf`.

    `scale_by_lr`: SlowMo's own form, `buf = mu*buf + D/gamma; anchor -= lr*gamma*buf` with the
    inner learning rate gamma of the step at which the mean is applied. `clip` (CO2's phi):
    `anchor -= lr * clamp(buf, -clip, clip)`, in the parameters' own unit, or with
    `clip_unit="rms"` as a multiple of the root mean square of buf over its tensor.
    """

    lr: float
    momentum: float
    scale_by_lr: bool = False
    clip: float | None = None
    clip_unit: ClipUnit = "absolute"

    slots = ("momentum",)
    keeps_anchor = True
    has_momentum = True

    @property
    def is_linear(self) -> bool:
        """Unless it is clipped, or scaled by an inner rate that may change between two rounds."""
        return self.clip is None and not self.scale_by_lr

    def validate(self) -> None:
        """Require a positive rate, 0 <= momentum < 1 and a positive clip."""
        _require_positive("lr", self.lr)
        _require_fraction("momentum", self.momentum)
        _require_clip(self.clip, self.clip_unit)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return `lr * buf`, in place of `grad`."""
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
        return _clip(grad.copy_(buffer), self.clip, self.clip_unit, context).mul_(lr)


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's rule: `buf = mu*buf + D; anchor -= lr * (D + mu*buf)`, as `torch.optim.SGD`.

    `clip` clamps the whole direction `D + mu*buf`; see `Momentum`.
    """

    lr: float
    momentum: float
    clip: float | None = None
    clip_unit: ClipUnit = "absolute"

    slots = ("momentum",)
    keeps_anchor = True
    has_momentum = True

    @property
    def is_linear(self) -> bool:
        """Unless it is clipped."""
        return self.clip is None

    def validate(self) -> None:
        """Require a positive rate, 0 <= momentum < 1 and a positive clip."""
        _require_positive("lr", self.lr)
        _require_fraction("momentum", self.momentum)
        _require_clip(self.clip, self.clip_unit)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return `lr * (D + mu*buf)`, in place of `grad`."""
        buffer = slots["momentum"].mul_(self.momentum).add_(grad)
        grad.add_(torch.mul(buffer, self.momentum, out=context.scratch))
        return _clip(grad, self.clip, self.clip_unit, context).mul_(self.lr)


@dataclass(frozen=True)
class Adam:
    """FedAdam with bias correction: the standard Adam update with gradient D."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8

    slots = ("exp_avg", "exp_avg_sq")
    keeps_anchor = True
    is_linear = False
    has_momentum = False

    def validate(self) -> None:
        """Require positive lr and eps, and both betas in [0, 1)."""
        _require_positive("lr", self.lr)
        _require_positive("eps", self.eps)
        for index, beta in enumerate(self.betas):
            _require_fraction(f"betas[{index}]", beta)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return the bias-corrected step, in place of `grad`."""
        beta1, beta2 = self.betas
        scratch = context.scratch
        mean = slots["exp_avg"].mul_(beta1)
        mean.add_(torch.mul(grad, 1 - beta1, out=scratch))
        square = slots["exp_avg_sq"].mul_(beta2)
        square.add_(torch.mul(grad, grad, out=scratch).mul_(1 - beta2))
        root = torch.sqrt(square, out=scratch).div_(math.sqrt(1 - beta2**context.round))
        update = torch.mul(mean, self.lr / (1 - beta1**context.round), out=grad)
        return update.div_(root.add_(self.eps))


def _clip(direction: Tensor, clip: float | None, unit: str, context: OuterContext) -> Tensor:
    """Clamp `direction` in place to +-clip, a constant or a multiple of each tensor's RMS."""
    if clip is None:
        return direction
    if unit == "absolute":
        return direction.clamp_(-clip, clip)
    bounds = context.per_tensor.rms(direction).mul_(clip)
    bound = context.per_tensor.spread(bounds, context.scratch)
    torch.minimum(direction, bound, out=direction)
    return torch.maximum(direction, bound.neg_(), out=direction)


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"outer_optimizer.{name}={value} must be a finite number above 0")


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"outer_optimizer.{name}={value} must be at least 0 and below 1")


def _require_clip(clip: float | None, unit: str) -> None:
    require_choice("outer_optimizer.clip_unit", unit, ClipUnit)
    if clip is not None:
        _require_positive("clip", clip)
    elif unit != "absolute":
        raise ValueError(
            f"outer_optimizer.clip_unit={unit!r} has no effect without outer_optimizer.clip; "
            "set clip, e.g. 3.0 (times the RMS), or leave clip_unit out"
        )
