"""Split matrices come together on one rank and go back, whatever the shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsx.core.types import Fragment, Slot
from dsx.method.fragments import lay_out
from dsx.outer import piece_moves
from dsx.outer.matrix_owners import WholeMatrices
from dsx.outer.piece_moves import MOVED_AT_A_TIME, AllToAll
from dsx.outer.whole_matrices import MatrixGather, buffer_bytes, plan_gathers, wires_of

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


def elements(slot: Slot) -> int:
    return slot.numel


WANTED = WholeMatrices(takes, elements)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 8000), min_size=0, max_size=4),
    st.sampled_from([777, 2000, MOVED_AT_A_TIME]),
)
def test_matrices_are_whole_on_the_wire_and_return(cuts: list[int], at_a_time: int) -> None:
    layouts = shards(cuts)
    values = {n: torch.randn(shape) for n, shape in WHOLES.items()}
    with patch.object(piece_moves, "MOVED_AT_A_TIME", at_a_time):
        gathers = [plan([[own] for own in layouts], r)[0] for r in range(len(layouts))]
    own = [flat(layout, values) for layout in layouts]
    wires = [torch.full((gather.wire.numel,), torch.nan) for gather in gathers]
    passes = run_together(
        [
            lambda all_to_all, r=r: gathers[r].to_wire(own[r], wires[r], all_to_all)
            for r in range(len(gathers))
        ]
    )
    for gather, wire in zip(gathers, wires, strict=True):
        assert torch.equal(wire, flat(gather.wire, values))
    held = [slot for gather in gathers for slot in gather.wire.layout]
    assert all(slot.is_whole for slot in held if takes(slot))
    assert sum(slot.numel for slot in held) == sum(v.numel() for v in values.values())
    is_split = any(not s.is_whole and takes(s) for layout in layouts for s in layout.layout)
    assert all(gather.is_needed == bool(passes) for gather in gathers) and bool(passes) >= is_split

    back = [torch.full_like(x, torch.nan) for x in own]
    again = run_together(
        [
            lambda all_to_all, r=r: gathers[r].from_wire(wires[r], back[r], all_to_all)
            for r in range(len(gathers))
        ]
    )
    assert all(torch.equal(a, b) for a, b in zip(own, back, strict=True))
    most = max(map(elements_moved, layouts, [gather.wire for gather in gathers]))
    assert passes == again == -(-most // at_a_time)
    for gather in gathers:
        room = 2 * (min(at_a_time, most) + len(layouts) - 1)  # a part of an element more of each
        assert buffer_bytes([gather]) <= 4 * room
        if passes:
            assert gather.memory.num_bytes == buffer_bytes([gather])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 8000), min_size=1, max_size=4), st.sampled_from([777, 8000]))
def test_a_mean_leaves_its_place_to_what_is_sent_next(cuts: list[int], at_a_time: int) -> None:
    """Piece by piece: each element of a rank's comes once, and goes where its mean has been."""
    layouts = shards(cuts)
    values = {n: torch.randn(shape) for n, shape in WHOLES.items()}
    with patch.object(piece_moves, "MOVED_AT_A_TIME", at_a_time):
        gathers = [plan([[own] for own in layouts], r)[0] for r in range(len(layouts))]
    wires = [flat(gather.wire, values) for gather in gathers]
    seen = [torch.full_like(flat(layout, values), torch.nan) for layout in layouts]
    visits = [torch.zeros_like(x) for x in seen]

    def double(r: int, all_to_all: AllToAll) -> None:
        for piece in gathers[r].pieces(wires[r], wires[r], all_to_all):
            assert piece.mean is not None and piece.sent is not None
            assert len(piece.mean) == len(piece.sent) == piece.numel > 0
            piece.of(seen[r]).copy_(piece.mean)
            piece.of(visits[r]).add_(1)
            piece.sent.copy_(2 * piece.mean)

    run_together([lambda all_to_all, r=r: double(r, all_to_all) for r in range(len(gathers))])
    assert all((each == 1).all() for each in visits)
    for layout, gather, own, wire in zip(layouts, gathers, seen, wires, strict=True):
        assert torch.equal(own, flat(layout, values))
        assert torch.equal(wire, 2 * flat(gather.wire, values))


def elements_moved(own: Fragment, wire: Fragment) -> int:
    """What a rank sends, or receives, whichever is more."""
    here = {slot.name: slot.numel for slot in own.layout}
    there = {slot.name: slot.numel for slot in wire.layout}
    sent = sum(numel for name, numel in here.items() if name not in there)
    received = sum(numel - here.get(name, 0) for name, numel in there.items())
    return max(sent, received)


def test_fragments_take_turns_with_the_memory_that_pieces_are_packed_into() -> None:
    wholes = {f"{n}.{i}": (64, 48) for n in range(3) for i in range(n + 1)}
    assignment = [[name for name in wholes if name.startswith(f"{n}.")] for n in range(3)]
    layouts = [lay_out(assignment, evenly(wholes, r, 4), wholes) for r in range(4)]
    own = plan(layouts, 1)
    assert len({id(gather.memory) for gather in own}) == 1
    largest = plan([of_rank[2:] for of_rank in layouts], 1)
    assert 0 < buffer_bytes(largest) <= buffer_bytes(own) < 4 * 2 * own[2].wire.numel * 4


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
    sent = [sum(r.wire.numel for r in plan(layouts, rank)) for rank in range(num_ranks)]
    assert sent == [sum(f.numel for f in own) for own in wires_of(layouts, WANTED)]
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
    return plan_gathers(layouts, rank, WANTED, torch.device("cpu"))


def flat(layout: Fragment, values: dict[str, Tensor]) -> Tensor:
    parts = [values[s.name].reshape(-1)[s.start : s.start + s.numel] for s in layout.layout]
    return torch.cat(parts) if parts else torch.empty(0)


def run_together(calls: Sequence[Callable[[AllToAll], None]]) -> int:
    """Run one call per rank, each on a thread; return how many times they have exchanged."""
    sent: list[Sequence[Tensor]] = [[] for _ in calls]
    meet, passes = Barrier(len(calls)), [0 for _ in calls]

    def run(rank: int) -> None:
        def all_to_all(outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
            sent[rank] = outgoing
            passes[rank] += 1
            meet.wait(10)
            for sender, tensor in enumerate(incoming):
                tensor.copy_(sent[sender][rank])
            meet.wait(10)

        calls[rank](all_to_all)

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(run, range(len(calls))))
    assert len(set(passes)) == 1
    return passes[0]
