"""A Megatron run's experts become one model: cut as each class and layout does, they come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsx.engines.hf_folder import folder
from dsx.engines.megatron_model.experts import KINDS
from dsx.engines.megatron_model.family import family_of
from dsx.engines.megatron_model.notes import ExpertNotes
from tests.engines.megatron_saved import GPT2, LLAMA, Shape, save_run, with_notes
from tests.engines.megatron_saved_experts import (
    EXPERTS,
    FFN,
    SHARED,
    TOP,
    cut_mixture,
    mixture_notes,
    mixture_weights,
)
from tests.engines.test_hf_folder import export

WHERE = Path("saved")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "is_transformers_installed", lambda: False)


def shape_of(kind: str) -> Shape:
    return GPT2 if kind == "qwen2_moe" else LLAMA  # whose heads make up the hidden size


def notes_for(kind: str, *layout: Any, **more: Any) -> Any:
    notes = mixture_notes(shape_of(kind), kind, *layout, **more)
    return with_notes(notes, frequencies=[1.0]) if kind == "qwen2_moe" else notes


@pytest.mark.parametrize(
    ("kind", "layout", "ranks", "slices", "dense"),
    [
        ("mixtral", "SequentialMLP", 2, 2, ()),
        ("mixtral", "GroupedMLP", 2, 2, ()),
        ("qwen2_moe", "TEGroupedMLP", 4, 1, ()),
        ("qwen2_moe", "GroupedMLP", 1, 2, (1,)),
        ("qwen3_moe", "SequentialMLP", 1, 1, (0,)),
        ("qwen3_moe", "TEGroupedMLP", 2, 2, (1,)),
        ("qwen3_moe", "GroupedMLP", 4, 1, ()),
    ],
)
def test_experts_of_each_class(
    kind: str, layout: str, ranks: int, slices: int, dense: tuple[int, ...], tmp_path: Path
) -> None:
    shape = shape_of(kind)
    expected = mixture_weights(shape, kind, dense)
    held = cut_mixture(shape, expected, kind, layout, ranks, slices, dense)
    base = save_run(tmp_path / "run", held, notes_for(kind, layout, ranks, slices, dense=dense))
    code, said = export(base, "--hf", tmp_path / "out")
    assert code == 0 and f"as {kind}: {len(expected)} tensors" in said, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name  # of w - 0.25 and w + 0.25
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == kind
    code, said = export(base, "--out", tmp_path / "own")
    assert code == 0, said
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert not [name for name in own if "slice_" in name or "experts_" in name]
    experts = [name for name in own if ".experts." in name]
    per_layer = 2 if layout == "GroupedMLP" else 2 * EXPERTS
    assert len(experts) == per_layer * (shape.layers - len(dense))
    # as one rank holds all of them
    whole = cut_mixture(shape, expected, kind, layout, 1, 1, dense)
    assert {name for name in whole if ".experts." in name} == set(experts)
    for name in experts:
        assert torch.allclose(own[name], whole[name], atol=1e-6), name


def test_sizes_and_settings_are_the_run_s() -> None:
    made = {kind: family_of(notes_for(kind, KINDS[0], 2, 1), WHERE).config for kind in FAMILIES}
    for config in made.values():
        assert config["num_experts_per_tok"] == TOP and config["router_aux_loss_coef"] == 0.01
    mixtral, qwen2, qwen3 = made.values()
    assert (mixtral["num_local_experts"], mixtral["intermediate_size"]) == (EXPERTS, FFN)
    for qwen in (qwen2, qwen3):
        assert (qwen["num_experts"], qwen["moe_intermediate_size"]) == (EXPERTS, FFN)
        assert (qwen["mlp_only_layers"], qwen["decoder_sparse_step"]) == ([], 1)
    assert qwen2["shared_expert_intermediate_size"] == SHARED
    assert (qwen2["norm_topk_prob"], qwen3["norm_topk_prob"]) == (False, True)
    assert qwen3["head_dim"] == 4 and "head_dim" not in qwen2
    every_other = notes_for("qwen3_moe", KINDS[0], 2, 1, dense=(0,))
    assert family_of(every_other, WHERE).config["mlp_only_layers"] == [0]
    twice = {**every_other.transformer, "moe_layer_freq": 2}
    config = family_of(with_notes(every_other, transformer=twice), WHERE).config
    assert config["mlp_only_layers"] == [1]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True .* in mixtral"),
        ("mixtral", {"moe_layer_freq": [0, 1]}, r"layers \[0\] have no experts"),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "score_function='sigmoid'"),
        ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "type='sinkhorn'"),
        ("mixtral", {"add_qkv_bias": True}, "add_qkv_bias=True .* in mixtral"),
        ("qwen2_moe", {"moe_shared_expert_gate": False}, "gate=False .*--moe-shared-expert-gate"),
        ("qwen2_moe", {"add_qkv_bias": False}, r"add_qkv_bias=False .*\(--add-qkv-bias\)"),
        ("qwen3_moe", {"moe_router_group_topk": 2}, "moe_router_group_topk=2 .* in qwen3_moe"),
        ("qwen3_moe", {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0"),
    ],
)
def test_settings_that_a_family_does_not_have(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    notes = notes_for(kind, KINDS[0], 2, 1)
    family_of(notes, WHERE)
    with pytest.raises(ValueError, match=message):
        family_of(with_notes(notes, transformer={**notes.transformer, **changes}), WHERE)


def test_what_is_not_whole_or_not_known(tmp_path: Path) -> None:
    def held(layout: str) -> dict[str, Any]:
        weights = mixture_weights(LLAMA, "mixtral")
        return cut_mixture(LLAMA, weights, "mixtral", layout, 2, 1)

    def without(layout: str, part: str) -> dict[str, Any]:
        return {name: w for name, w in held(layout).items() if part not in name}

    first, last = KINDS[0], KINDS[-1]
    notes = {kind: mixture_notes(LLAMA, "mixtral", kind, 2, 1) for kind in KINDS}
    earlier = notes[first].as_json().replace('"format": 2', '"format": 1')
    earlier = json.dumps({k: v for k, v in json.loads(earlier).items() if k != "experts"})
    strange = with_notes(notes[first], experts=ExpertNotes(["OtherMLP"], [[0, 1], [2, 3]]))
    twice = with_notes(notes[first], experts=ExpertNotes([first], [[0, 1], [1, 2]]))
    fewer = with_notes(notes[first], experts=ExpertNotes([first], [[0, 1, 2, 3]]))
    cases: list[tuple[dict[str, Any], Any, str]] = [
        (held(first), earlier, "of an earlier dsx, does not say how they lie: go on from it with"),
        (held(first), None, "more slices of weights, and no dsx_megatron.json"),
        (held(first), strange, "of OtherMLP, and dsx knows the experts of SequentialMLP"),
        (held(first), twice, "hold experts [[0, 1], [1, 2]], and dsx puts together those"),
        (held(first), fewer, "of expert-parallel rank 1, and its dsx_megatron.json tells of 1"),
        (without(first, "1.linear_fc2.weight.experts_1"), notes[first], "experts.3.linear_fc2"),
        (without(last, "weight1.experts_0"), notes[last], "weight1 of the expert-parallel ranks"),
    ]
    for index, (weights, told, message) in enumerate(cases):
        base = save_run(tmp_path / str(index), weights, told)
        code, said = export(base, "--out", tmp_path / "out")
        assert code == 2 and message in said, (message, said)
        assert not (tmp_path / "out").exists()
