"""Tensors in slices: whole at the other end, and no wrong byte is taken."""

from __future__ import annotations

import pytest
import torch

from dsx.outer import parcel
from dsx.outer.parcel import Opened, Parcel


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "LEAST_SLICE_BYTES", 10)


def made() -> Parcel:
    tensors = {
        "a": torch.arange(7, dtype=torch.float32),
        "nothing": torch.empty(0),
        "b": torch.tensor([[1, 2], [3, 4]], dtype=torch.int64),
        "c": torch.tensor(3.5),
    }
    return Parcel({"step": 4}, tensors)


def test_all_of_it_arrives_in_any_order() -> None:
    sent = made()
    opened = Opened(sent.head)
    assert opened.values == {"step": 4} and opened.num_bytes == sent.num_bytes == 64
    order = torch.randperm(len(opened.hashes)).tolist()
    assert len(order) == 7 and all(opened.put(index, sent.slice(index)) for index in order)
    assert torch.equal(opened.tensors["a"], torch.arange(7.0))
    assert opened.tensors["b"].tolist() == [[1, 2], [3, 4]]
    assert opened.tensors["c"].item() == 3.5 and "nothing" not in opened.tensors


def test_a_slice_with_another_bit_is_not_taken() -> None:
    sent = made()
    opened = Opened(sent.head)
    opened.tensors["a"].fill_(9.0)
    wrong = bytearray(sent.slice(0))
    wrong[3] ^= 1
    assert not opened.put(0, bytes(wrong))
    assert opened.tensors["a"].tolist() == [9.0] * 7


def test_equal_bits_have_equal_heads_and_others_do_not() -> None:
    other = made()
    assert made().head == other.head
    assert Parcel({"step": 5}, {}).head != Parcel({"step": 4}, {}).head


def test_a_head_that_is_none_is_refused() -> None:
    head = made().head.replace(b'"slice_bytes": 10', b'"slice_bytes": 16')
    with pytest.raises(ValueError, match="7 slices for 64 bytes"):
        Opened(head)


def test_what_is_here_already_is_told_by_its_hash() -> None:
    sent = made()
    opened = Opened(sent.head)
    assert not any(opened.length_if_held(index) for index in range(7))
    held = torch.arange(7.0)
    held[3] = 9.0  # of the second slice, bytes 10 to 20
    opened.begin_with("a", held)
    opened.begin_with("b", torch.zeros(3, dtype=torch.int64))  # of another shape: of no use
    opened.begin_with("c", None)
    assert [opened.length_if_held(index) for index in range(7)] == [10, 0, 0, 0, 0, 0, 0]
    for index in range(1, 7):
        assert opened.put(index, sent.slice(index))
    assert torch.equal(opened.tensors["a"], torch.arange(7.0))
    assert opened.tensors["b"].tolist() == [[1, 2], [3, 4]]
