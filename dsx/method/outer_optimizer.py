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

With `state_dtype` "bf16" buffers are rounded to bf16 behind each update, which itself sees and
makes fp32 ones (outer/outer_update.py).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from annotated_types import Ge, Gt, Lt

from dsx.core.checks import require_bounds, require_choice
from dsx.core.registry import contract, register
from dsx.core.types import PerTensor
from dsx.method.clip import ClipUnit, clip_to, require_clip
from dsx.method.in_one_pass import momentum_
from dsx.method.stability import LinearRule

if TYPE_CHECKING:
    from torch import Tensor

StateDtype = Literal["fp32", "bf16"]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class OuterContext:
    """What an update may need beyond the tensors.

    `round` counts outer steps from 1, `inner_lr` is the inner learning rate, `scratch` free work
    space `[numel]`, `per_tensor` the norms of single tensors. `out` is where the update is wanted;
    None: in place of the gradient.
    """

    round: int
    inner_lr: float
    scratch: Tensor
    per_tensor: PerTensor
    out: Tensor | None = None


@contract("outer_optimizer")
class OuterOptimizer(Protocol):
    """A rule that turns a pseudo-gradient into an update; a new one says `validate` and `update`.

    - `slots`: names of its state buffers `[numel]`, each zero at the start; `update` gets them in
      fp32;
    - `state_dtype`: what they are kept in from round to round; with "bf16" `update` is called for
      parts of a fragment, unless it measures tensors;
    - `keeps_anchor`: whether there is an anchor to move at all;
    - `has_momentum`: whether a staleness penalty on the gradient makes sense;
    - `stability_rule`: as which of stability.py's rules its `lr` and `momentum` can diverge; None
      where nothing is known;
    - `takes_parts`: whether it does the same to each element, whatever the others are: it is then
      given a part of a fragment at a time;
    - `leaves_gradient`: whether `update` leaves `grad` as it is where the context has an `out`.
    """

    slots: tuple[str, ...] = ()
    state_dtype: StateDtype = "fp32"
    keeps_anchor: bool = True
    has_momentum: bool = False
    stability_rule: LinearRule | None = None
    takes_parts: bool = False
    leaves_gradient: bool = False

    @property
    def nonlinear_by(self) -> str | None:
        """What keeps the update of a sum from being the sum of the updates; None if nothing does.

        Eager overlap splits updates so, and names it in its refusal.
        """
        return f"{type(self).__name__} (nonlinear_by)"

    @property
    def measures_tensors(self) -> bool:
        """Whether it asks for norms of single tensors, which take work space."""
        return False

    @property
    def uses_inner_rate(self) -> bool:
        """Whether an update depends on the inner learning rate of its step."""
        return False

    @abstractmethod
    def validate(self) -> None:
        """Raise ValueError for a value outside the rule's range."""
        ...

    @abstractmethod
    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return what is to be subtracted from the anchor, in place of `grad`; moves `slots`.

        With `leaves_gradient`, in `context.out` if that is given.
        """
        ...


@register("outer_optimizer", "none")
@dataclass(frozen=True)
class NoOuterStep(OuterOptimizer):
    """Parameters are averaged in place: no anchor, no state (DreamDDP, parameter averaging)."""

    keeps_anchor = False
    takes_parts = True

    def validate(self) -> None:
        """Nothing to check."""

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Refuse: there is no anchor to update."""
        raise AssertionError("no outer step is taken where there is no anchor")


@register("outer_optimizer", "sgd")
@dataclass(frozen=True)
class SGD(OuterOptimizer):
    """`anchor -= lr * D`; LocalSGD / FedAvg is `lr=1` (the anchor becomes the mean)."""

    lr: Positive
    """The outer learning rate, above 0; at 1 the anchor becomes the mean of the clusters."""

    stability_rule = "sgd"
    takes_parts = True
    leaves_gradient = True

    @property
    def nonlinear_by(self) -> str | None:
        """Nothing."""
        return None

    def validate(self) -> None:
        """Require a positive rate."""
        require_bounds("outer_optimizer", self)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return `lr * D`."""
        import torch

        return torch.mul(grad, self.lr, out=_out(grad, context))


@register("outer_optimizer", "momentum")
@dataclass(frozen=True)
class Momentum(OuterOptimizer):
    """Heavy ball (SlowMo, CO2): `buf = mu*buf + D; anchor -= lr * buf`.

    `scale_by_lr`: SlowMo's own form, `buf = mu*buf + D/gamma; anchor -= lr*gamma*buf` with the
    inner learning rate gamma of the step at which the mean is applied. `clip` (CO2's phi):
    `anchor -= lr * clamp(buf, -clip, clip)`, in the parameters' own unit, or with
    `clip_unit="rms"` as a multiple of the root mean square of buf over its tensor.
    """

    lr: Positive
    """The outer learning rate, above 0."""
    momentum: Fraction
    """The momentum (mu), from 0 and below 1."""
    scale_by_lr: bool = False
    """Whether to scale by the inner learning rate of the step, as SlowMo is written."""
    clip: Annotated[float | None, Gt(0)] = None
    """The largest size of a direction's element, above 0; null: no limit."""
    clip_unit: ClipUnit = "absolute"
    """The unit of `clip`: that of the parameters, or the root mean square of each tensor."""
    state_dtype: StateDtype = "fp32"
    """What the momentum is kept in; bf16, rounded at random, takes half the bytes."""

    slots = ("momentum",)
    has_momentum = True
    stability_rule = "momentum"
    leaves_gradient = True

    @property
    def nonlinear_by(self) -> str | None:
        """A clip, or an inner rate that may change between two rounds."""
        if self.scale_by_lr:
            return "scale_by_lr"
        return None if self.clip is None else "a clip"

    @property
    def measures_tensors(self) -> bool:
        """Where a clip is a multiple of each tensor's RMS."""
        return self.clip is not None and self.clip_unit == "rms"

    @property
    def takes_parts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Unless it measures tensors."""
        return not self.measures_tensors

    @property
    def uses_inner_rate(self) -> bool:
        """If it scales by it."""
        return self.scale_by_lr

    def validate(self) -> None:
        """Require a positive rate, 0 <= momentum < 1 and a positive clip."""
        require_bounds("outer_optimizer", self)
        require_choice("outer_optimizer.state_dtype", self.state_dtype, StateDtype)
        require_clip(self.clip, self.clip_unit)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return `lr * buf`."""
        import torch

        lr, out = self.lr, _out(grad, context)
        if self.scale_by_lr:
            if context.inner_lr <= 0:
                raise ValueError(
                    f"outer_optimizer.scale_by_lr divides by the inner learning rate, which is "
                    f"{context.inner_lr} at outer round {context.round}; keep it above 0 at every "
                    "sync or set scale_by_lr to false"
                )
            grad = torch.div(grad, context.inner_lr, out=out)
            lr *= context.inner_lr
        buffer, scratch = slots["momentum"], context.scratch
        if self.clip is None:
            return momentum_(grad, buffer, out, scratch, lr, self.momentum, False)
        buffer.mul_(self.momentum).add_(grad)
        out.copy_(buffer)
        tensors = context.per_tensor
        return clip_to(out, self.clip, self.clip_unit, tensors, scratch).mul_(lr)


@register("outer_optimizer", "nesterov")
@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """DiLoCo's rule: `buf = mu*buf + D; anchor -= lr * (D + mu*buf)`, as `torch.optim.SGD`.

    `clip` clamps the whole direction `D + mu*buf`; see `Momentum`.
    """

    lr: Positive
    """The outer learning rate, above 0."""
    momentum: Fraction
    """The momentum (mu), from 0 and below 1."""
    clip: Annotated[float | None, Gt(0)] = None
    """The largest size of a direction's element, above 0; null: no limit."""
    clip_unit: ClipUnit = "absolute"
    """The unit of `clip`: that of the parameters, or the root mean square of each tensor."""
    state_dtype: StateDtype = "fp32"
    """What the momentum is kept in; bf16, rounded at random, takes half the bytes."""

    slots = ("momentum",)
    has_momentum = True
    stability_rule = "nesterov"
    leaves_gradient = True

    @property
    def nonlinear_by(self) -> str | None:
        """A clip."""
        return None if self.clip is None else "a clip"

    @property
    def measures_tensors(self) -> bool:
        """Where a clip is a multiple of each tensor's RMS."""
        return self.clip is not None and self.clip_unit == "rms"

    @property
    def takes_parts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Unless it measures tensors."""
        return not self.measures_tensors

    def validate(self) -> None:
        """Require a positive rate, 0 <= momentum < 1 and a positive clip."""
        require_bounds("outer_optimizer", self)
        require_choice("outer_optimizer.state_dtype", self.state_dtype, StateDtype)
        require_clip(self.clip, self.clip_unit)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return `lr * (D + mu*buf)`."""
        import torch

        buffer, scratch, out = slots["momentum"], context.scratch, _out(grad, context)
        if self.clip is None:
            return momentum_(grad, buffer, out, scratch, self.lr, self.momentum, True)
        buffer.mul_(self.momentum).add_(grad)
        torch.add(grad, torch.mul(buffer, self.momentum, out=scratch), out=out)
        tensors = context.per_tensor
        return clip_to(out, self.clip, self.clip_unit, tensors, scratch).mul_(self.lr)


@register("outer_optimizer", "adam")
@dataclass(frozen=True)
class Adam(OuterOptimizer):
    """FedAdam with bias correction: the standard Adam update with gradient D."""

    lr: Positive
    """The outer learning rate, above 0."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """The decays of the two moving averages, each from 0 and below 1."""
    eps: Positive = 1e-8
    """What is added to the root of the second average, above 0."""
    state_dtype: StateDtype = "fp32"
    """What both averages are kept in; bf16, rounded at random, takes half the bytes."""

    slots = ("exp_avg", "exp_avg_sq")
    takes_parts = True
    leaves_gradient = True

    @property
    def nonlinear_by(self) -> str | None:
        """Its own square root."""
        return "adam"

    def validate(self) -> None:
        """Require positive lr and eps, and both betas in [0, 1)."""
        require_bounds("outer_optimizer", self)
        require_choice("outer_optimizer.state_dtype", self.state_dtype, StateDtype)

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        """Return the bias-corrected step."""
        import torch

        beta1, beta2 = self.betas
        scratch = context.scratch
        mean = slots["exp_avg"].mul_(beta1)
        mean.add_(torch.mul(grad, 1 - beta1, out=scratch))
        square = slots["exp_avg_sq"].mul_(beta2)
        square.add_(torch.mul(grad, grad, out=scratch).mul_(1 - beta2))
        root = torch.sqrt(square, out=scratch).div_(math.sqrt(1 - beta2**context.round))
        update = torch.mul(mean, self.lr / (1 - beta1**context.round), out=_out(grad, context))
        return update.div_(root.add_(self.eps))


def slot_dtypes(rule: OuterOptimizer, names: Sequence[str]) -> dict[str, str]:
    """Return torch's name of what each buffer is kept in: fp32, but for the rule's own."""
    own = "bfloat16" if rule.state_dtype == "bf16" else "float32"
    return {name: own if name in rule.slots else "float32" for name in names}


def _out(grad: Tensor, context: OuterContext) -> Tensor:
    return grad if context.out is None else context.out
