"""Outer rules over buffers in bf16, against the rules in plain torch: the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.types import Fragment, ParameterShape, Slot
from dsx.method.outer_optimizer import SGD, Adam, Momentum, Nesterov, OuterContext, OuterOptimizer
from dsx.outer import outer_update, stochastic_rounding
from dsx.outer.outer_update import OuterUpdate
from dsx.outer.per_tensor import ShardedTensors
from tests.reference_rounding import rounded

NUMEL = {"a": 60, "b": 7, "c": 110}
BOUNDS = {"a": (0, 60), "b": (60, 67), "c": (67, 177)}
INNER_LR = 0.1
Buffer = dict[str, Tensor]
Plain = Callable[[Tensor, Buffer, int], Tensor]  # the update for a tensor, of buffers in fp32


def momentum(g: Tensor, b: Buffer, round: int) -> Tensor:
    b["momentum"] = 0.9 * b["momentum"] + g
    return 0.3 * b["momentum"]


def slowmo(g: Tensor, b: Buffer, round: int) -> Tensor:
    b["momentum"] = 0.5 * b["momentum"] + g / INNER_LR
    return (0.3 * INNER_LR) * b["momentum"]


def clipped_by_rms(g: Tensor, b: Buffer, round: int) -> Tensor:
    b["momentum"] = 0.2 * b["momentum"] + g
    bound = 1.5 * (b["momentum"].square().sum() / g.numel()).sqrt()
    return 0.5 * torch.maximum(torch.minimum(b["momentum"], bound), -bound)


def nesterov(g: Tensor, b: Buffer, round: int) -> Tensor:
    b["momentum"] = 0.9 * b["momentum"] + g
    return 0.7 * (g + 0.9 * b["momentum"]).clamp(-0.4, 0.4)


def adam(g: Tensor, b: Buffer, round: int) -> Tensor:
    b["exp_avg"] = 0.8 * b["exp_avg"] + g * (1 - 0.8)
    b["exp_avg_sq"] = 0.9 * b["exp_avg_sq"] + g * g * (1 - 0.9)
    root = b["exp_avg_sq"].sqrt() / math.sqrt(1 - 0.9**round)
    return b["exp_avg"] * (0.01 / (1 - 0.8**round)) / (root + 1e-6)


RULES: dict[str, tuple[OuterOptimizer, Plain]] = {
    "momentum": (Momentum(0.3, 0.9, state_dtype="bf16"), momentum),
    "slowmo": (Momentum(0.3, 0.5, scale_by_lr=True, state_dtype="bf16"), slowmo),
    "clip by rms": (
        Momentum(0.5, 0.2, clip=1.5, clip_unit="rms", state_dtype="bf16"), clipped_by_rms,
    ),
    "nesterov, clip": (Nesterov(0.7, 0.9, clip=0.4, state_dtype="bf16"), nesterov),
    "adam": (Adam(0.01, (0.8, 0.9), 1e-6, state_dtype="bf16"), adam),
}  # fmt: skip


def context(round: int, numel: int = 177) -> OuterContext:
    shapes = [ParameterShape(name, (count,)) for name, count in NUMEL.items()]
    slots = [Slot(n, (stop - start,), start) for n, (start, stop) in BOUNDS.items()]
    fragment, fold = Fragment(0, 0, tuple(slots if numel else ())), torch.empty(numel)
    tensors = ShardedTensors(fragment, shapes, lambda x: x, lambda: fold, torch.device("cpu"))
    return OuterContext(round, INNER_LR, torch.full((numel,), torch.nan), tensors)


def fragment() -> Fragment:
    return Fragment(0, 0, tuple(Slot(n, (b - a,), a) for n, (a, b) in BOUNDS.items()))


@pytest.mark.parametrize("tile", [50, 1 << 20])
@pytest.mark.parametrize("name", RULES)
def test_equals_plain_torch_bit_for_bit(
    name: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (outer_update, stochastic_rounding):
        monkeypatch.setattr(module, "TILE", tile)
    rule, plain = RULES[name]
    update = OuterUpdate([fragment()], Buffers())
    slots = {n: torch.zeros(177, dtype=torch.bfloat16) for n in rule.slots}
    buffers = {p: {n: torch.zeros(k) for n in rule.slots} for p, k in NUMEL.items()}
    generator = torch.Generator().manual_seed(0)
    for round in range(1, 9):
        gradient = torch.randn(177, generator=generator)
        expected: list[Tensor] = []
        for parameter, (start, stop) in BOUNDS.items():
            own = buffers[parameter]
            expected.append(plain(gradient[start:stop].clone(), own, round))
            for n, moved in own.items():
                own[n] = rounded(moved, f"outer.{n}", parameter, round)
        given = gradient.clone()
        found = update.of(rule, given, slots, context(round), (0, 0), "outer")
        assert found.data_ptr() == given.data_ptr()
        if name == "clip by rms":  # sums of squares are taken in another order
            torch.testing.assert_close(found, torch.cat(expected), rtol=1e-6, atol=0)
        else:
            assert torch.equal(found, torch.cat(expected))
        for n, slot in slots.items():
            whole = torch.cat([buffers[parameter][n] for parameter in BOUNDS])
            assert torch.equal(slot.float(), whole), (round, n)


def test_buffers_in_fp32_are_the_rules_own() -> None:
    """As before: nothing in between, whatever other buffers there are."""
    rule, slots = Nesterov(0.7, 0.9), {"momentum": torch.zeros(177), "start": torch.ones(3)}
    ours, theirs = torch.randn(177), {"momentum": torch.zeros(177)}
    expected = rule.update(ours.clone(), theirs, context(1))
    found = OuterUpdate([fragment()], Buffers()).of(rule, ours, slots, context(1), (0, 0), "outer")
    assert torch.equal(found, expected) and torch.equal(slots["momentum"], theirs["momentum"])


def test_a_rank_without_elements_measures_with_the_others() -> None:
    """Norms of tensors are collective: it has to be there."""
    rule, _ = RULES["clip by rms"]
    asked: list[int] = []

    def summed(x: Tensor) -> Tensor:
        asked.append(x.numel())
        return x

    shapes = [ParameterShape(name, (count,)) for name, count in NUMEL.items()]
    none = torch.empty(0)
    tensors = ShardedTensors(Fragment(0, 0, ()), shapes, summed, lambda: none, none.device)
    update = OuterUpdate([Fragment(0, 0, ())], Buffers())
    slots = {"momentum": none.bfloat16()}
    update.of(rule, none, slots, OuterContext(1, INNER_LR, none, tensors), (0, 0), "outer")
    assert asked == [len(NUMEL)]


@pytest.mark.parametrize("rule", [Momentum, Nesterov, Adam])
def test_what_a_buffer_cannot_be_kept_in_is_refused(rule: type) -> None:
    values = {"lr": 0.1} if rule is Adam else {"lr": 0.1, "momentum": 0.9}
    rule(**values, state_dtype="bf16").validate()
    with pytest.raises(ValueError, match=r"state_dtype='fp16' is not known; allowed: 'fp32', 'b"):
        rule(**values, state_dtype="fp16").validate()
    assert SGD(lr=1.0).state_dtype == "fp32"
