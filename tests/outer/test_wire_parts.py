"""A fragment part by part, beside what travels: short parts, or all of it where that is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.config.schema import preset
from dsx.method.method import Method
from dsx.outer import work_space
from dsx.outer.whole_matrices import plan_gathers
from dsx.outer.wire_parts import WireParts
from tests.outer.test_whole_matrices import WANTED, WHOLES, flat, run_together, shards

LONGEST = 100
CUT = preset("dilocox", 2)
MEASURES = preset("co2", 2, compression={"type": "low_rank", "rank": 4})


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_space, "LONGEST", LONGEST)


def parts_of(
    method: Method, layouts: Any, rank: int, all_to_all: Any, used: dict[str, Tensor]
) -> WireParts:
    gathers = plan_gathers([[own] for own in layouts], rank, WANTED, torch.device("cpu"))

    def whole(fragment: int, purpose: str) -> Tensor:
        return used.setdefault(purpose, torch.zeros(layouts[rank].numel))

    ranks = SimpleNamespace(all_to_all=all_to_all)
    adapter: Any = SimpleNamespace(fragments=[layouts[rank]], ranks=ranks)
    state: Any = SimpleNamespace(device=torch.device("cpu"), whole=whole)
    return WireParts(method, adapter, gathers, state)


@pytest.mark.parametrize("method", [CUT, MEASURES], ids=["cut", "whole"])
@pytest.mark.parametrize("cuts", [[], [1000, 3000]], ids=["alone", "three ranks"])
def test_each_element_comes_with_its_mean_and_is_sent(cuts: list[int], method: Method) -> None:
    """Where all of a fragment is needed of what ranks put together, in work space as long."""
    layouts = shards(cuts)
    is_cut = work_space.is_cut(method, method.outer_optimizer)
    assert is_cut == (method is CUT)
    values = {n: torch.randn(shape) for n, shape in WHOLES.items()}
    gathers = [
        plan_gathers([[own] for own in layouts], r, WANTED, torch.device("cpu"))[0]
        for r in range(len(layouts))
    ]
    wires = [flat(gather.wire, values) for gather in gathers]

    def negate(rank: int, all_to_all: Any) -> None:
        used = dict[str, Tensor]()
        parts, own = parts_of(method, layouts, rank, all_to_all, used), flat(layouts[rank], values)
        lengths: list[int] = []
        for there in parts.of(0, wires[rank], wires[rank], method.outer_optimizer):
            assert there.mean is not None and there.sent is not None
            assert torch.equal(there.mean, there.part.of(own))
            there.sent.copy_(-there.mean)
            lengths.append(there.part.numel)
        assert sum(lengths) == len(own)
        is_needed = gathers[rank].is_needed
        assert max(lengths) == (LONGEST if is_cut else len(own))
        assert used.keys() == ({"mean"} if is_needed and not is_cut else set())

    run_together([lambda a2a, r=r: negate(r, a2a) for r in range(len(layouts))])
    for gather, wire in zip(gathers, wires, strict=True):
        assert torch.equal(wire, -flat(gather.wire, values))


def test_a_rank_with_nothing_of_a_fragment_has_one_empty_part() -> None:
    layouts = shards([0])
    assert layouts[0].numel == 0
    (gather,) = plan_gathers([[own] for own in layouts], 0, WANTED, torch.device("cpu"))
    calls: list[object] = []
    parts = parts_of(CUT, layouts, 0, lambda *lists: calls.append(lists), {})
    for mean in (torch.zeros(gather.wire.numel), None):
        (only,) = parts.of(0, mean, None, CUT.outer_optimizer)
        assert only.part.numel == 0 and (only.mean is None) == (mean is None)
    assert bool(calls) == gather.is_needed  # what others have of it has passed
