"""A Megatron run's slices become one model: weights are cut as by its ranks, and come back."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsx.engines.hf_folder import folder
from dsx.engines.megatron_model.family import family_of
from dsx.engines.megatron_model.huggingface import HuggingFaceModel
from dsx.engines.megatron_model.llama import rotary_scaling
from dsx.engines.megatron_model.notes import ModelNotes
from tests.checkpoint.test_weight_files import anonymous_bytes
from tests.engines.megatron_saved import (
    GPT2,
    LLAMA,
    Shape,
    cut_gpt2,
    cut_llama,
    gpt2_weights,
    llama_weights,
    notes_of,
    save_run,
    with_notes,
)
from tests.engines.test_hf_folder import export
from tests.installed import needs

WHERE = Path("saved")


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "is_transformers_installed", lambda: False)


def model(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], ModelNotes]:
    """Return weights in Hugging Face's form, the same as the ranks hold them, and notes."""
    if kind == "gpt2":
        weights = gpt2_weights(GPT2)
        return weights, cut_gpt2(GPT2, weights), notes_of(GPT2, False)
    bias, norms = kind == "qwen2", kind == "qwen3"
    shape = LLAMA if kind != "qwen2" else GPT2  # whose heads make up the hidden size
    weights = llama_weights(shape, bias, norms)
    notes = notes_of(shape, True, add_qkv_bias=bias, qk_layernorm=norms)
    if kind == "qwen2":
        notes = with_notes(notes, frequencies=[1.0])
    return weights, cut_llama(shape, weights), notes


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3"])
def test_weights_of_each_family(kind: str, tmp_path: Path) -> None:
    expected, held, notes = model(kind)
    base = save_run(tmp_path / "run", held, notes)
    code, said = export(base, "--hf", tmp_path / "out")
    assert code == 0, said
    assert f"as {kind}: {len(expected)} tensors" in said
    assert "vocabulary: 10 of 12 rows, without Megatron's padding" in said
    assert "mean of 2 clusters" in said
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name  # of w - 0.25 and w + 0.25
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == kind and config["vocab_size"] == 10
    assert config["torch_dtype"] == "float32"


def test_sizes_and_settings_are_the_run_s() -> None:
    llama = family_of(model("llama")[2], WHERE).config
    assert (llama["hidden_size"], llama["intermediate_size"]) == (8, 6)
    assert (llama["num_attention_heads"], llama["num_key_value_heads"]) == (4, 2)
    assert (llama["head_dim"], llama["num_hidden_layers"]) == (4, 2)
    assert (llama["rope_theta"], llama["rope_scaling"]) == (10000.0, None)
    assert (llama["rms_norm_eps"], llama["max_position_embeddings"]) == (1e-6, 5)
    assert llama["bos_token_id"] is llama["eos_token_id"] is None
    assert not llama["tie_word_embeddings"]
    notes = model("gpt2")[2]
    gpt2 = family_of(notes, WHERE).config
    assert (gpt2["n_embd"], gpt2["n_inner"], gpt2["n_layer"], gpt2["n_head"]) == (8, 6, 2, 4)
    assert (gpt2["attn_pdrop"], gpt2["resid_pdrop"], gpt2["n_positions"]) == (0.2, 0.1, 5)
    assert gpt2["activation_function"] == "gelu"
    fused = with_notes(notes, transformer={**notes.transformer, "bias_activation_fusion": True})
    assert family_of(fused, WHERE).config["activation_function"] == "gelu_new"


def test_megatron_s_own_names(tmp_path: Path) -> None:
    expected, held, notes = model("llama")
    base = save_run(tmp_path / "run", held, notes)
    code, said = export(base, "--out", tmp_path / "out", "--dtype", "bf16")
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    both = ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    fc1 = torch.cat([expected[name] for name in both])
    assert torch.allclose(found["decoder.layers.1.mlp.linear_fc1.weight"].float(), fc1, atol=0.02)
    assert found["embedding.word_embeddings.weight"].shape == (12, 8)  # padded as it was
    assert len(found) == 2 * 6 + 3 and not [name for name in found if "slice" in name]
    names = list(found)
    assert {name for name in names if "bias" in name} == set()


def test_norms_inside_linear_layers_and_gains_around_zero(tmp_path: Path) -> None:
    expected, held, notes = model("llama")
    for layer in range(2):  # as Transformer Engine has them
        name = f"decoder.layers.{layer}."
        fused = {
            "input_layernorm": "self_attention.linear_qkv",
            "pre_mlp_layernorm": "mlp.linear_fc1",
        }
        for apart, inside in fused.items():
            gain = held.pop(f"{name}{apart}.weight")
            held[f"{name}{inside}.layer_norm_weight"] = gain - 1
    held["decoder.final_layernorm.weight"] = held["decoder.final_layernorm.weight"] - 1
    changed = {**notes.transformer, "layernorm_zero_centered_gamma": True}
    base = save_run(tmp_path / "run", held, with_notes(notes, transformer=changed))
    code, said = export(base, "--hf", tmp_path / "out")
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-5), name


def test_a_tied_head_and_a_vocabulary_of_which_nothing_is_said(tmp_path: Path) -> None:
    expected, held, notes = model("llama")
    held = {name: tensor for name, tensor in held.items() if "output_layer" not in name}
    base = save_run(tmp_path / "run", held, with_notes(notes, is_tied=True, vocab_size=None))
    code, said = export(base, "--hf", tmp_path / "out")
    assert code == 0 and "vocabulary: all 12 rows, with those that Megatron pads it by" in said
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    assert found["model.embed_tokens.weight"].shape == (12, 8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["vocab_size"] == 12


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"add_bias_linear": True}, r"add_bias_linear=True .* in llama .*--disable-bias"),
        ("llama", {"normalization": "LayerNorm"}, r"normalization='LayerNorm' .* RMSNorm"),
        ("llama", {"window_size": [4, 0]}, r"window_size=\[4, 0\] .* \(no --window-size\)"),
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved=True"),
        ("llama", {"multi_latent_attention": True}, "multi_latent_attention=True"),
        ("qwen3", {"add_qkv_bias": True}, "add_qkv_bias=True .* in qwen3"),
        ("qwen2", {"kv_channels": 4}, r"kv_channels=4 .* kv_channels=2 \(no --kv-channels\)"),
        ("gpt2", {"num_query_groups": 2}, "num_query_groups=2 .* num_query_groups=4"),
        ("gpt2", {"gated_linear_unit": True}, r"gated_linear_unit=True .* \(no --swiglu\)"),
        ("gpt2", {"qk_layernorm": True}, "qk_layernorm=True .* in gpt2"),
    ],
)
def test_settings_that_a_family_does_not_have(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    notes = model(kind)[2]
    family_of(notes, WHERE)
    with pytest.raises(ValueError, match=f"saved/dsx_megatron.json: {message}"):
        family_of(with_notes(notes, transformer={**notes.transformer, **changes}), WHERE)


def test_models_of_another_form() -> None:
    notes = model("llama")[2]
    with pytest.raises(ValueError, match=r"activation='relu' of Megatron .* activation='silu'"):
        family_of(with_notes(notes, activation="relu"), WHERE)
    with pytest.raises(ValueError, match="the model is a MambaModel, and dsx knows"):
        family_of(with_notes(notes, kind="MambaModel"), WHERE)
    with pytest.raises(ValueError, match="position_embedding_type='yarn' of Megatron has no form"):
        family_of(with_notes(notes, positions="yarn"), WHERE)
    half = {**notes.rotary, "percent": 0.5}
    with pytest.raises(ValueError, match=r"rotary_percent=0.5 .*\(--rotary-percent 1.0\)"):
        family_of(with_notes(notes, rotary=half), WHERE)


def scaled_as_megatron(base: float, count: int, factor: float) -> list[float]:
    """Return the frequencies of --use-rope-scaling, from the publication of Llama 3.1."""
    found = []
    for index in range(count):
        frequency = base ** (-index / count)
        length = 2 * torch.pi / frequency
        if length > 8192:
            frequency /= factor
        elif length > 2048:
            smooth = (8192 / length - 1) / 3
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        found.append(torch.tensor(frequency).item())  # fp32
    return found


def test_rotary_positions() -> None:
    notes = model("llama")[2]
    rotary = {"base": 500000, "percent": 1.0, "is_scaled": True, "interpolation": None}
    frequencies = scaled_as_megatron(500000.0, 32, 8.0)
    scaled = with_notes(notes, rotary=rotary, frequencies=frequencies)
    assert rotary_scaling(scaled, WHERE) == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    short = with_notes(notes, rotary={**rotary, "base": 10000})
    assert rotary_scaling(short, WHERE) is None  # no wave is long enough
    apart = with_notes(notes, rotary={**notes.rotary, "interpolation": 2})
    assert rotary_scaling(apart, WHERE) == {"rope_type": "linear", "factor": 2.0}
    both = with_notes(scaled, rotary={**rotary, "interpolation": 2})
    other = with_notes(notes, rotary={**notes.rotary, "base": 9999})
    for refused in (both, other):
        with pytest.raises(ValueError, match="have frequencies that no config.json gives"):
            rotary_scaling(refused, WHERE)


@pytest.mark.ci
@needs("transformers")
@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_rotary_frequencies_are_those_of_transformers(factor: float | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    notes = notes_of(Shape(head=64, length=16384), True)
    rotary = {"base": 500000, "percent": 1.0, "is_scaled": factor is not None}
    frequencies = scaled_as_megatron(500000.0, 32, factor or 1.0)
    notes = with_notes(notes, rotary={**rotary, "interpolation": None}, frequencies=frequencies)
    made = LlamaRotaryEmbedding(LlamaConfig.from_dict(family_of(notes, WHERE).config))
    assert torch.allclose(made.inv_freq, torch.tensor(frequencies), rtol=1e-6, atol=0)


def test_what_is_not_whole_or_not_of_this_form(tmp_path: Path) -> None:
    _, held, notes = model("llama")
    lacking = {name: w for name, w in held.items() if "1.mlp.linear_fc2" not in name}
    slice_gone = {n: w for n, w in held.items() if n != "output_layer.weight.slice_0"}
    beside = {**held, "decoder.final_layernorm.bias": torch.zeros(8)}
    later = notes.as_json().replace('"format": 2', '"format": 3')
    without = with_notes(notes, cuts={})
    cases: list[tuple[str, dict[str, Tensor], ModelNotes | str | None, str]] = [
        ("--hf", lacking, notes, "lacks decoder.layers.1.mlp.linear_fc2.weight and 0 more"),
        ("--hf", beside, notes, "holds decoder.final_layernorm.bias and 0 more weights that a ll"),
        ("--hf", slice_gone, notes, "lacks slices of output_layer.weight: it holds"),
        ("--out", held, None, "and no dsx_megatron.json, which says how they are joined"),
        ("--out", held, later, "is of format 3, and this dsx reads 1 to 2"),
        ("--out", held, "{", "cannot be read (JSONDecodeError"),
        ("--out", held, '{"format": 1}', "cannot be read (KeyError"),
        (
            "--out",
            held,
            without,
            "does not say how decoder.layers.0.self_attention.linear_qkv.weight is c",
        ),
    ]
    for index, (option, weights, told, message) in enumerate(cases):
        base = save_run(tmp_path / str(index), weights, told)
        code, said = export(base, option, tmp_path / "out")
        assert code == 2 and message in said, (message, said)
        assert not (tmp_path / "out").exists()


def test_options_that_are_not_of_a_megatron_run(tmp_path: Path) -> None:
    _, held, notes = model("llama")
    base, out = save_run(tmp_path / "run", held, notes), tmp_path / "out"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, said = export(base, "--hf", out, "--config", tmp_path)
    assert code == 2 and "of a Megatron run config.json follows from what the run" in said
    code, said = export(base, "--out", out, "--format", "universal")
    assert code == 2 and "--format universal is DeepSpeed's" in said
    assert not out.exists()


@pytest.mark.ci
def test_memory_is_that_of_some_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(
        layers=12, hidden=512, heads=8, groups=4, head=64, ffn=1024, vocab=3000, rows=3072, length=8
    )
    weights = cut_llama(shape, llama_weights(shape))
    frequencies = [10000.0 ** (-i / 32) for i in range(32)]
    notes = with_notes(notes_of(shape, True), frequencies=frequencies)
    base = save_run(tmp_path / "run", weights, notes)
    total = 4 * sum(w.numel() for w in weights.values())
    layer = 4 * sum(w.numel() for name, w in weights.items() if ".layers.3." in name)
    assert total > 12 * layer
    del weights
    held: list[int] = []
    made = HuggingFaceModel.tensor

    def tensor(self: HuggingFaceModel, name: str) -> Tensor:
        found = made(self, name)
        held.append(anonymous_bytes())
        return found

    monkeypatch.setattr(HuggingFaceModel, "tensor", tensor)
    small = model("llama")
    export(save_run(tmp_path / "small", *small[1:]), "--hf", tmp_path / "warm")  # what it imports
    ctypes.CDLL(None).malloc_trim(0)  # or what malloc keeps of before would be used again
    before = anonymous_bytes()
    held.clear()
    code, said = export(base, "--hf", tmp_path / "out")
    assert code == 0, said
    most = max(held) - before  # two layers, the largest weight, and what malloc keeps
    assert most < 6 * layer, (most, layer, total)
