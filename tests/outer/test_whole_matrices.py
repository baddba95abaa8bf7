"""Split matrices come together on one rank and go back, whatever the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsx.core.types import Fragment, Slot
from dsx.method.fragments import lay_out
from dsx.outer.whole_matrices import MatrixGather, plan_gathers, share_out

WHOLES = {"a": (40, 30), "b": (1200,), "c": (50, 64), "embed": (40, 40), "d": (5, 7)}


def shards(cuts: Sequence[int]) -> list[Fragment]:
    """Cut the flattened parameters, one after another, into ranges, as ZeRO-1 does."""
    numel = {n: torch.zeros(shape).numel() for n, shape in WHOLES.items()}
    total = sum(numel.values())
    bounds = [0, *sorted(min(cut, total) for cut in cuts), total]
    fragments: list[Fragment] = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        pieces: dict[str, tuple[tuple[int, ...], int]] = {}
        begin = 0
        for name, shape in WHOLES.items():
            first, last = max(start, begin), min(stop, begin + numel[name])
            if last > first:
                is_all = last - first == numel[name]
                pieces[name] = (shape if is_all else (last - first,), first - begin)
            begin += numel[name]
        fragments.append(lay_out([list(WHOLES)], pieces, WHOLES)[0])
    return fragments


def takes(slot: Slot) -> bool:
    return len(slot.whole) == 2 and not slot.is_small and slot.name != "embed"


@given(st.lists(st.integers(0, 8000), min_size=0, max_size=4))
def test_matrices_are_whole_on_the_wire_and_return(cuts: list[int]) -> None:
    layouts = shards(cuts)
    values = {n: torch.randn(shape) for n, shape in WHOLES.items()}
    matrix_gathers = [plan([[own] for own in layouts], r)[0] for r in range(len(layouts))]
    own = [flat(layout, values) for layout in layouts]
    wires = [torch.full((gather.wire.numel,), torch.nan) for gather in matrix_gathers]
    exchanged = run_together(
        [
            lambda round, r=r: matrix_gathers[r].to_wire(own[r], wires[r], round)
            for r in range(len(matrix_gathers))
        ]
    )
    for gather, wire in zip(matrix_gathers, wires, strict=True):
        assert torch.equal(wire, flat(gather.wire, values))
    held = [slot for gather in matrix_gathers for slot in gather.wire.layout]
    assert all(slot.is_whole for slot in held if takes(slot))
    assert sum(slot.numel for slot in held) == sum(v.numel() for v in values.values())
    is_split = any(not s.is_whole and takes(s) for layout in layouts for s in layout.layout)
    assert all(gather.is_needed == is_split for gather in matrix_gathers) and exchanged == is_split

    back = [torch.full_like(x, torch.nan) for x in own]
    run_together(
        [
            lambda round, r=r: matrix_gathers[r].from_wire(wires[r], back[r], round)
            for r in range(len(matrix_gathers))
        ]
    )
    assert all(torch.equal(a, b) for a, b in zip(own, back, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("widths", [(48,) * 6, (72, 36, 8, 6)], ids=["equal", "as in a layer"])
@pytest.mark.parametrize("layers_per_fragment", [1, 4])
def test_ranks_own_alike_where_all_hold_equal_parts(
    num_ranks: int, widths: tuple[int, ...], layers_per_fragment: int
) -> None:
    """Parameters cut evenly over all ranks, as ZeRO-3 does."""
    num_layers = 24
    wholes = {f"{n}.{i}": (64, w) for n in range(num_layers) for i, w in enumerate(widths)}
    names = list(wholes)
    size = layers_per_fragment * len(widths)
    assignment = [names[i : i + size] for i in range(0, len(names), size)]
    layouts = [lay_out(assignment, evenly(wholes, r, num_ranks), wholes) for r in range(num_ranks)]
    _, sent = share_out(layouts, takes)
    assert sent == [sum(r.wire.numel for r in plan(layouts, rank)) for rank in range(num_ranks)]
    assert sum(sent) == num_layers * 64 * sum(widths)
    assert max(sent) - min(sent) <= 64 * max(widths)


def evenly(
    wholes: Mapping[str, tuple[int, ...]], rank: int, num_ranks: int
) -> dict[str, tuple[tuple[int, ...], int]]:
    pieces: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, (rows, columns) in wholes.items():
        run = -(-rows * columns // num_ranks)
        first, last = rank * run, min((rank + 1) * run, rows * columns)
        pieces[name] = ((last - first,), first)
    return pieces


def plan(layouts: Sequence[Sequence[Fragment]], rank: int) -> list[MatrixGather]:
    return plan_gathers(layouts, rank, takes, torch.device("cpu"))


def flat(layout: Fragment, values: dict[str, Tensor]) -> Tensor:
    parts = [values[s.name].reshape(-1)[s.start : s.start + s.numel] for s in layout.layout]
    return torch.cat(parts) if parts else torch.empty(0)


def run_together(calls: list) -> bool:
    """Run one call per rank up to its all-to-all, exchange, and run them again to their ends."""
    sent: list[list[Tensor]] = []

    class AtTheAllToAll(Exception):
        pass

    def stop(outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        sent.append([t.clone() for t in outgoing])
        raise AtTheAllToAll

    for call in calls:
        try:
            call(stop)
        except AtTheAllToAll:
            continue
    for rank, call in enumerate(calls):

        def deliver(
            outgoing: Sequence[Tensor], incoming: Sequence[Tensor], rank: int = rank
        ) -> None:
            for sender, tensor in enumerate(incoming):
                tensor.copy_(sent[sender][rank])

        call(deliver)
    return bool(sent)
