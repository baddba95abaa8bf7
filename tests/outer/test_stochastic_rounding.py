"""Rounding to bf16 at random: by its definition, to the bit, wherever elements lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.types import Fragment, Slot
from dsx.outer import stochastic_rounding
from dsx.outer.stochastic_rounding import StochasticRounding
from tests.reference_rounding import rounded

SHAPES = {"wte": (40, 9), "norm": (9,), "fc": (17, 30)}


def fragment_of(cuts: dict[str, tuple[int, int]]) -> Fragment:
    """The elements first..last of each parameter, side by side."""
    slots: list[Slot] = []
    offset = 0
    for name, (first, last) in cuts.items():
        slots.append(Slot(name, (last - first,), offset, first, SHAPES[name]))
        offset += last - first
    return Fragment(0, 0, tuple(slots))


WHOLE = {"wte": (0, 360), "norm": (0, 9), "fc": (0, 510)}
NUMEL = 879


def values(seed: int, numel: int = NUMEL) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return x * torch.exp2(torch.randint(-140, 120, (numel,), generator=generator))


def kept(fragment: Fragment, x: Tensor, buffer: str = "outer.momentum", round: int = 3) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.bfloat16)
    StochasticRounding([fragment], Buffers()).write(x.clone(), out, 0, 0, buffer, round)
    return out.float()


@pytest.mark.parametrize("tile", [7, 369, 1 << 20])
def test_is_what_its_definition_says(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochastic_rounding, "TILE", tile)
    x, expected = values(0), []
    for (name, (first, last)), part in zip(WHOLE.items(), x.split([360, 9, 510]), strict=True):
        assert part.numel() == last - first
        expected.append(rounded(part, "outer.momentum", name, 3))
    found = kept(fragment_of(WHOLE), x)
    assert torch.equal(found, torch.cat(expected))
    assert not torch.equal(found, x.bfloat16().float())  # the nearest would be something else
    for buffer, round in (("outer.momentum", 4), ("delay.momentum", 3)):
        assert not torch.equal(kept(fragment_of(WHOLE), x, buffer, round), found)


def test_is_the_same_however_parameters_are_cut_over_ranks() -> None:
    x = dict(zip(WHOLE, values(1).split([360, 9, 510]), strict=True))
    whole = kept(fragment_of(WHOLE), torch.cat(list(x.values())))
    shares = {
        "wte": [(0, 7), (7, 359), (359, 360)],
        "norm": [(0, 9)],
        "fc": [(0, 1), (1, 500), (500, 510)],
    }
    found = {name: torch.full((last,), torch.nan) for name, (_, last) in WHOLE.items()}
    for rank in range(3):
        cuts = {name: parts[rank] for name, parts in shares.items() if rank < len(parts)}
        pieces = kept(fragment_of(cuts), torch.cat([x[n][a:b] for n, (a, b) in cuts.items()]))
        for (n, (a, b)), piece in zip(
            cuts.items(), pieces.split([b - a for a, b in cuts.values()]), strict=True
        ):
            found[n][a:b] = piece
    assert torch.equal(torch.cat(list(found.values())), whole)


def test_parts_of_a_fragment_are_parts_of_the_whole() -> None:
    x, fragment = values(2), fragment_of(WHOLE)
    rounding = StochasticRounding([Fragment(0, 0, ()), fragment], Buffers())
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    for start, stop in ((300, NUMEL), (0, 300)):
        rounding.write(x[start:stop].clone(), out[start:stop], 1, start, "outer.momentum", 3)
    assert torch.equal(out.float(), kept(fragment, x))


def test_what_bf16_has_stays_and_what_is_not_finite_stays_so() -> None:
    x = values(3).bfloat16().float()
    x[:4] = torch.tensor([0.0, -0.0, 1.0, -(2.0**-126)])
    assert torch.equal(kept(fragment_of(WHOLE), x).view(torch.int32), x.view(torch.int32))
    x[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x[3:5] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN, all ones
    found = kept(fragment_of(WHOLE), x)
    assert not found[:5].isfinite().any() and found[5:].isfinite().all()
    assert found[:2].tolist() == [torch.inf, -torch.inf]


def test_small_additions_are_not_lost_as_they_are_to_the_nearest() -> None:
    """0.001 to 1, of which bf16's neighbour is 0.0078 away: 500 of them are 0.5 in the mean."""
    rounding, fragment = StochasticRounding([f := fragment_of(WHOLE)], Buffers()), f
    at_random = torch.ones(NUMEL, dtype=torch.bfloat16)
    nearest = at_random.clone()
    for round in range(500):
        rounding.write(at_random.float() + 0.001, at_random, 0, 0, "outer.momentum", round)
        nearest.copy_(nearest.float() + 0.001)
    assert nearest.eq(1).all()
    # one element is 0.5 +- sqrt(500 * 0.13 * 0.87) * 0.0078; of all of them the mean
    assert at_random.float().mean() == pytest.approx(1.5, abs=5 * 0.059 / fragment.numel**0.5)
    assert at_random.float().std() == pytest.approx(0.059, rel=0.2)
