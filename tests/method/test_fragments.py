"""Fragments partition the model, whatever the names and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.core.types import ParameterShape
from dsx.method.fragments import ByLayer, BySize, WholeModel, group_by_layer, lay_out

LLAMA = ["embedding.weight"]
LLAMA += [f"layers.{i}.{n}" for i in range(12) for n in ("attention.weight", "mlp.weight")]
LLAMA += ["norm.weight", "head.weight"]


def shapes(names: list[str]) -> list[ParameterShape]:
    return [ParameterShape(name, (4, index + 1)) for index, name in enumerate(names)]


def test_embedding_joins_the_first_layer_and_head_the_last() -> None:
    layers = group_by_layer(shapes(LLAMA))
    assert len(layers) == 12
    assert layers[0][0] == "embedding.weight" and "layers.0.mlp.weight" in layers[0]
    assert layers[-1][-2:] == ["norm.weight", "head.weight"]


def test_the_first_number_names_the_layer() -> None:
    names = ["encoder.layers.0.experts.3.w", "encoder.layers.0.experts.4.w", "decoder.layers.0.w"]
    assert group_by_layer(shapes(names)) == [names[:2], names[2:]]
    assert group_by_layer(shapes(["0.weight", "0.bias", "2.weight"])) == [
        ["0.weight", "0.bias"],
        ["2.weight"],
    ]


def test_a_model_without_numbers_has_a_layer_per_module() -> None:
    names = ["first.weight", "first.bias", "second.weight"]
    assert group_by_layer(shapes(names)) == [names[:2], names[2:]]


def test_strided_and_sequential() -> None:
    strided = ByLayer(4).assign(shapes(LLAMA))
    assert [n for n in strided[1] if "mlp" in n] == [f"layers.{i}.mlp.weight" for i in (1, 5, 9)]
    runs = ByLayer(4, "sequential").assign(shapes(LLAMA))
    assert [n for n in runs[1] if "mlp" in n] == [f"layers.{i}.mlp.weight" for i in (3, 4, 5)]


def test_too_many_fragments_say_how_many_fit() -> None:
    with pytest.raises(
        ValueError, match=r"num_fragments=13 exceeds the model's 12 layers: .*<= 12"
    ):
        ByLayer(13).assign(shapes(LLAMA))
    with pytest.raises(ValueError, match=r"exceeds the model's 2 parameters"):
        BySize(3).assign(shapes(["a", "b"]))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    num_fragments=st.integers(1, 8),
    data=st.data(),
)
def test_every_fragmenter_partitions(
    sizes: list[int], num_fragments: int, data: st.DataObject
) -> None:
    parameters = [ParameterShape(f"layers.{i}.w", (n,)) for i, n in enumerate(sizes)]
    num_fragments = min(num_fragments, len(sizes))
    fragmenter = data.draw(
        st.sampled_from(
            [
                WholeModel(),
                ByLayer(num_fragments),
                ByLayer(num_fragments, "sequential"),
                BySize(num_fragments),
            ]
        )
    )
    assignment = fragmenter.assign(parameters)
    assert len(assignment) == fragmenter.num_fragments
    assert all(assignment), "every fragment holds something"
    assert sorted(n for f in assignment for n in f) == sorted(p.name for p in parameters)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_a_layout_covers_what_a_rank_owns(owned: list[int]) -> None:
    assignment = [["a", "b"], ["c", "d"]]
    pieces = {n: ((k,), 2) for n, k in zip("abcd", owned, strict=True) if k}
    fragments = lay_out(assignment, pieces, dict.fromkeys("abcd", (11,)))
    assert sum(f.numel for f in fragments) == sum(owned)
    for fragment in fragments:
        offset = 0
        for slot in fragment.layout:
            assert slot.offset == offset and slot.start == 2
            offset += slot.numel
