"""Outer steps by native kernels have the bits of torch's operations, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.compress.wire.native import library
from dsx.core.types import PerTensor
from dsx.method import in_one_pass
from dsx.method.in_one_pass import blend_, difference_, momentum_
from dsx.method.outer_optimizer import SGD, Adam, Momentum, Nesterov, OuterContext, OuterOptimizer
from tests.compress.wire.installed_kernels import native  # noqa: F401  # pyright: ignore

SIZES = (0, 1, 15, 16, 17, 1000, 4099)


def vectors(numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two, with zeros, subnormal and huge numbers in them."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, numel, generator=generator).unbind()
    for vector in (x, y):
        vector[::7] = 0.0
        vector[1::11] *= 1e-42
        vector[2::13] *= 1e37
    return x.clone(), y.clone()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


SETS = library.instruction_sets() if library.unavailable() is None else ("none",)


@pytest.fixture(params=SETS)
def one(request: pytest.FixtureRequest, native: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """One instruction set of this processor, on one thread; `native` tells why there is none."""
    index = library.index_of(request.param)
    monkeypatch.setattr(in_one_pass.library, "index_of", {None: index}.__getitem__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_step_of_momentum(numel: int, looks_ahead: bool) -> None:
    """In place, and elsewhere."""
    lr, mu = 0.7, 0.9
    grad, buffer = vectors(numel, 3)
    moved = buffer * mu + grad
    expected = (grad + moved * mu if looks_ahead else moved) * lr
    for place in (None, torch.empty(numel)):
        own, kept, scratch = grad.clone(), buffer.clone(), torch.full((numel,), 5.0)
        out = own if place is None else place
        found = momentum_(own, kept, out, scratch, lr, mu, looks_ahead)
        assert found is out
        assert torch.equal(bits(kept), bits(moved)) and torch.equal(bits(out), bits(expected))
        assert bool((scratch == 5).all())  # the kernel did it
        assert place is None or torch.equal(own, grad)


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("numel", SIZES)
def test_a_mix(numel: int) -> None:
    local, anchor = vectors(numel, 4)
    expected, scratch = local * (1 - 0.3) + anchor * 0.3, torch.full((numel,), 5.0)
    assert blend_(local, anchor, scratch, 0.3) is local
    assert torch.equal(bits(local), bits(expected))
    assert bool((scratch == 5).all())


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("numel", [*SIZES, 2**18 + 3])
@pytest.mark.parametrize("place", [0, 1])
def test_a_difference(numel: int, place: int) -> None:
    """Also where it is long, and goes past the cache, from anywhere in memory."""
    origin, local = vectors(numel, 6)
    space = torch.full((numel + 2,), 5.0)
    out = space[place : numel + place]
    assert difference_(origin, local, out) is out
    assert torch.equal(bits(out), bits(origin - local))
    assert bool((space[numel + place :] == 5).all()) and bool((space[:place] == 5).all())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("reason", ["threads", "no kernels", "another dtype", "every second"])
def test_where_torch_does_it(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads of its own, no library, or what the kernels do not take."""
    threads = 2 if reason == "threads" else 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if reason == "no kernels":
        monkeypatch.setattr(in_one_pass.library, "unavailable", lambda: "none were built")
    local, anchor = vectors(200, 5)
    if reason == "another dtype":
        local, anchor = local.double(), anchor.double()
    if reason == "every second":
        local, anchor = local[::2], anchor[::2]
    expected, scratch = local * (1 - 0.3) + anchor * 0.3, torch.empty_like(anchor)
    assert torch.equal(blend_(local.clone() if reason != "every second" else local, anchor,
                              scratch, 0.3), expected)  # fmt: skip
    assert torch.equal(scratch, anchor * 0.3)


RULES: list[OuterOptimizer] = [
    SGD(lr=0.7), Momentum(lr=0.7, momentum=0.8), Momentum(lr=0.7, momentum=0.8, clip=0.5),
    Momentum(lr=0.7, momentum=0.8, scale_by_lr=True), Nesterov(lr=0.7, momentum=0.8),
    Nesterov(lr=0.7, momentum=0.8, clip=0.5), Adam(lr=0.1),
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_gradient_that_is_to_stay_does(
    rule: OuterOptimizer, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update elsewhere has the bits of that in place, round after round."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert rule.leaves_gradient
    unused: Any = None
    per_tensor: PerTensor = unused
    slots, others = ({name: torch.zeros(300) for name in rule.slots} for _ in range(2))
    for round in (1, 2, 3):
        grad, _ = vectors(300, round)
        own, out, scratch = grad.clone(), torch.empty(300), torch.empty(300)
        expected = rule.update(own, slots, OuterContext(round, 0.1, scratch, per_tensor))
        found = rule.update(grad, others, OuterContext(round, 0.1, scratch, per_tensor, out))
        assert found is out and torch.equal(grad, vectors(300, round)[0])
        assert expected is own and torch.equal(bits(found), bits(expected))
    assert all(torch.equal(slots[name], others[name]) for name in slots)
