"""Fragments partition the model, whatever the names and sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.core.types import ParameterShape, Stage
from dsx.method.fragments import (
    ByLayer,
    BySize,
    WholeModel,
    assign_stage,
    fewer_than_usual,
    group_by_layer,
    lay_out,
    usual_count,
)

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


def test_one_per_layer_up_to_a_limit() -> None:
    assert ByLayer(None).assign(shapes(LLAMA)) == group_by_layer(shapes(LLAMA))
    assert ByLayer(None, most=12).assign(shapes(LLAMA)) == group_by_layer(shapes(LLAMA))
    assert ByLayer(None, most=5).assign(shapes(LLAMA)) == ByLayer(5).assign(shapes(LLAMA))
    assert len(ByLayer(8, most=5).assign(shapes(LLAMA))) == 8  # a number is kept to


def test_too_many_fragments_say_how_many_fit() -> None:
    with pytest.raises(
        ValueError, match=r"num_fragments=13 exceeds the model's 12 layers: .*<= 12"
    ):
        ByLayer(13).assign(shapes(LLAMA))
    with pytest.raises(ValueError, match=r"exceeds the model's 2 parameters"):
        BySize(3).assign(shapes(["a", "b"]))


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (3, 3), (4, 4), (80, 4)])
@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_auto_is_four_or_a_fragment_per_layer(layers: int, count: int, pattern: Any) -> None:
    parameters = shapes([f"layers.{i}.w" for i in range(layers)])
    auto = ByLayer("auto", pattern)
    assert auto.assign(parameters) == ByLayer(count, pattern).assign(parameters)
    assert usual_count(auto) == 4  # what a schedule must have room for


def test_stages_of_one_layer_have_one_fragment_and_it_is_told() -> None:
    auto, stages = ByLayer("auto"), [Stage(index, 80) for index in range(80)]
    own = [shapes([f"layers.{stage.index}.a", f"layers.{stage.index}.b"]) for stage in stages]
    counts = [len(assign_stage(auto, p, s)) for p, s in zip(own, stages, strict=True)]
    assert counts == [1] * 80
    told = fewer_than_usual(auto, counts)
    assert told and "80 of 80 pipeline stages have 1 layer, and a fragment for each" in told
    assert "1 of 2 pipeline stages have 3 layers" in str(fewer_than_usual(auto, [4, 3]))
    assert "the model has 2 layers" in str(fewer_than_usual(auto, [2]))
    assert fewer_than_usual(auto, [4, 4]) is None
    assert fewer_than_usual(ByLayer(2), [2]) is None  # as it was asked for
    with pytest.raises(ValueError, match=r"pipeline stage 0 of 80.*num_fragments=4 exceeds"):
        assign_stage(ByLayer(4), own[0], stages[0])


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
