"""A piece of a master: where it lies, what is cut from it, and that it is looked into anew."""

from __future__ import annotations

import torch

from dsx.core.types import ParameterShape
from dsx.engines.masters import Masters, Piece


def test_cuts_between_any_two_elements_make_the_whole() -> None:
    flat = torch.arange(20.0)
    whole = Piece(flat, (2, 5), offset=7)
    assert whole.view().tolist() == list(range(7, 17))
    assert whole.cut(-3, 12) is whole
    for middle in range(1, 10):
        left, right = whole.cut(-1, middle), whole.cut(middle, 30)
        assert left is not None and right is not None
        assert (left.shape, right.shape) == ((middle,), (10 - middle,))
        assert (left.start, right.start) == (0, middle)
        assert torch.cat([left.view(), right.view()]).equal(whole.view())
    assert whole.cut(10, 12) is None
    assert whole.cut(-4, 0) is None


def test_a_cut_of_a_cut_keeps_its_place_in_the_parameter() -> None:
    piece = Piece(torch.arange(20.0), (10,), start=100, offset=4)
    inner = piece.cut(103, 105)
    assert inner is not None
    assert (inner.start, inner.numel, inner.view().tolist()) == (103, 2, [7.0, 8.0])


def test_masters_follow_a_tensor_whose_storage_is_replaced() -> None:
    master = torch.zeros(6, requires_grad=True)
    masters = Masters(
        [ParameterShape("w", (2, 2))], [["w"]], {"w": Piece(master, (2, 2), offset=1)}
    )
    master.data = torch.arange(6.0)
    out = torch.empty(4)
    masters.read(0, out)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    masters.write(0, -out)
    assert master.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, 5.0]
