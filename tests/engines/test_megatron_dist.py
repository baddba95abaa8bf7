"""`dsx export --megatron`: what is written is what Megatron's distributed checkpoints hold."""

from __future__ import annotations

import ctypes
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dsx.engines.megatron_model.dist_checkpoint import _Streamed
from dsx.engines.megatron_model.family import family_of
from dsx.engines.megatron_model.from_huggingface import HuggingFaceFolder
from dsx.engines.megatron_model.notes import ModelNotes
from tests.checkpoint.test_weight_files import anonymous_bytes
from tests.distributed import run_distributed
from tests.engines.megatron_saved import (
    Shape,
    cut_gpt2,
    cut_llama,
    gpt2_weights,
    llama_weights,
    notes_of,
    save_run,
    with_notes,
)
from tests.engines.megatron_saved_experts import (
    EXPERTS,
    FFN,
    cut_mixture,
    mixture_notes,
    mixture_weights,
)
from tests.engines.megatrons import (
    HIDDEN,
    LENGTH,
    MICRO_BATCHES,
    VOCAB,
    Kind,
    build_inner,
    needs_megatron,
    whole_weights,
)
from tests.engines.test_hf_folder import export
from tests.installed import needs

IN_USE = VOCAB - 2
RELEASE = "release"
# as the models of megatrons.py are
TINY = Shape(
    layers=4, hidden=HIDDEN, heads=4, groups=2, head=4, ffn=2 * HIDDEN, vocab=IN_USE, rows=VOCAB,
    length=LENGTH,
)  # fmt: skip
WIDE = Shape(**{**TINY.__dict__, "head": 8})
PLAIN_GPT = Shape(**{**TINY.__dict__, "heads": 2, "groups": 2, "head": 8})


def small(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """So that logits are of the order of one."""
    return {name: 0.25 * tensor for name, tensor in weights.items()}


def model(kind: str, layout: str = "SequentialMLP") -> tuple[Shape, dict[str, Tensor], ModelNotes]:
    """Return weights in Hugging Face's form, and the notes of a run."""
    rotary = {"base": 5000, "percent": 1.0, "is_scaled": False, "interpolation": None}
    if kind == "gpt2":
        notes = notes_of(PLAIN_GPT, False, layernorm_epsilon=1e-5)
        return PLAIN_GPT, small(gpt2_weights(PLAIN_GPT)), notes
    shape = WIDE if kind in ("qwen3", "qwen3_moe") else TINY
    frequencies = [5000.0 ** (-2 * i / shape.head) for i in range(shape.head // 2)]
    if kind.endswith("_moe") or kind == "mixtral":
        dense = (0, 2) if kind != "mixtral" else ()
        weights = mixture_weights(shape, kind, dense)
        notes = mixture_notes(shape, kind, layout, 2, 2, dense)
    else:
        weights = llama_weights(shape, kind == "qwen2", kind == "qwen3")
        notes = notes_of(shape, True, add_qkv_bias=kind == "qwen2", qk_layernorm=kind == "qwen3")
    return shape, small(weights), with_notes(notes, rotary=rotary, frequencies=frequencies)


def saved(base: Path, kind: str, layout: str = "SequentialMLP") -> Path:
    """Save a run of two tensor-parallel slices, and two by two of experts."""
    shape, weights, notes = model(kind, layout)
    if kind == "gpt2":
        held = cut_gpt2(shape, weights)
    elif notes.experts is None:
        held = cut_llama(shape, weights)
    else:
        dense = (0, 2) if kind != "mixtral" else ()
        held = cut_mixture(shape, weights, kind, layout, 2, 2, dense)
    return save_run(base, held, notes)


def folder(out: Path, kind: str) -> Path:
    """Write what save_pretrained does."""
    _, weights, notes = model(kind)
    out.mkdir()
    save_file({n: w.contiguous() for n, w in weights.items()}, out / "model.safetensors")
    config = family_of(with_notes(notes, rows=IN_USE), out).config
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer.json").write_text("{}")
    return out


def tensors_of(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a torch_dist checkpoint, whole, and its further states."""
    reader = FileSystemReader(directory)
    state: dict[str, Any] = {
        name: io.BytesIO()
        if isinstance(entry, BytesStorageMetadata)
        else torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    load(state, storage_reader=reader)
    tensors = {name: t for name, t in state.items() if isinstance(t, Tensor)}
    return tensors, {name: state[name] for name in state.keys() - tensors.keys()}


def test_one_tensor_of_layers_that_are_alike(tmp_path: Path) -> None:
    base = saved(tmp_path / "run", "mixtral", "GroupedMLP")
    code, said = export(base, "--megatron", tmp_path / "out", "--dtype", "bf16")
    assert code == 0 and "wrote 5 file(s)" in said, said
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == RELEASE
    tensors, states = tensors_of(tmp_path / "out" / RELEASE)
    _, weights, _ = model("mixtral")
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    fc1 = tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert fc1.shape == (4, EXPERTS, 2 * FFN, HIDDEN)
    for layer in range(4):
        for number in range(EXPERTS):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{number}."
            both = torch.cat([weights[f"{name}w1.weight"], weights[f"{name}w3.weight"]])
            assert torch.allclose(fc1[layer, number].float(), both, atol=0.02)
    assert tensors["embedding.word_embeddings.weight"].shape == (VOCAB, HIDDEN)
    norms = [name for name in tensors if "norm" in name]
    assert sorted(norms) == [
        "decoder.final_layernorm.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight",
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    ]
    experts = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_3.1_4.4"
    assert experts in states and "decoder.final_layernorm._extra_state/shard_0_1" in states
    for text in json.loads((tmp_path / "out" / RELEASE / "metadata.json").read_text()).values():
        assert text in ("torch_dist", "torch", 1)


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_a_folder_of_hugging_face(kind: str, tmp_path: Path) -> None:
    """The same weights make the same checkpoint, whichever of the two they come from."""
    given = folder(tmp_path / "hf", kind)
    assert export(saved(tmp_path / "run", kind), "--megatron", tmp_path / "own")[0] == 0
    code, said = export(given, "--megatron", tmp_path / "out")
    assert "not looked at" not in said
    assert code == 0 and "tokenizer: tokenizer.json" in said, said
    own, states = tensors_of(tmp_path / "own" / RELEASE)
    found, also = tensors_of(tmp_path / "out" / RELEASE)
    assert found.keys() == own.keys() and states.keys() == also.keys()
    for name, tensor in own.items():
        rows = IN_USE if name.startswith(("embedding.word", "output_layer")) else None
        assert torch.allclose(found[name], tensor[:rows], atol=1e-6), name
    # and the table read backwards gives the very bits again
    _, weights, _ = model(kind)
    source = HuggingFaceFolder(given)
    seen: set[str] = set()
    for name, weight in source.parameters.items():
        parts = weight.match.split(source.tensor(name))
        for target, part in zip(weight.match.targets, parts, strict=True):
            assert part.equal(weights[target]), target
            seen.add(target)
    assert seen == weights.keys()
    flags = (tmp_path / "out" / "flags.txt").read_text()
    assert f"--num-layers 4 --hidden-size {HIDDEN}" in flags
    assert ("--moe-router-pre-softmax" in flags) == (kind == "qwen2_moe")
    assert ("--qk-layernorm" in flags) == (kind in ("qwen3", "qwen3_moe"))
    assert flags.endswith(f"--tokenizer-model {tmp_path / 'out' / 'tokenizer'}\n")


def test_what_is_refused(tmp_path: Path) -> None:
    given = folder(tmp_path / "hf", "llama")
    config = json.loads((given / "config.json").read_text())
    out = tmp_path / "out"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "mamba"}, "model_type 'mamba', and dsx makes Megatron checkpoints of gpt2"),
        ({"attention_bias": True}, "attention_bias=True has no form in Megatron that dsx knows"),
        ({"hidden_act": "relu"}, "hidden_act='relu' has no form"),
        ({"sliding_window": 4, "use_sliding_window": None}, "sliding_window=4 has no form"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rotary positions of base 5000.0, {'rope_type': 'yarn'",
        ),
        ({"rope_theta": 5000.5}, "of base 5000.5, {'rope_type': 'default'}, have no form"),
        ({"head_dim": 8}, "model.layers.0.self_attn.q_proj.weight is [16, 16], and"),
        ({"num_hidden_layers": 5}, "lacks model.layers.4.input_layernorm.weight and 8 more"),
        ({"num_hidden_layers": 3}, "holds model.layers.3.input_layernorm.weight and 8 more"),
        ({"rms_norm_eps": None}, "does not give rms_norm_eps: add it"),
    ]
    for changes, message in cases:
        changed = {k: v for k, v in {**config, **changes}.items() if v is not None}
        (given / "config.json").write_text(json.dumps(changed))
        code, said = export(given, "--megatron", out)
        assert code == 2 and message in said, (message, said)
    (given / "config.json").write_text(json.dumps({**config, "of_tomorrow": 1}))
    code, said = export(given, "--megatron", tmp_path / "told")
    assert code == 0 and "not looked at in its config.json: of_tomorrow\n" in said, said
    code, said = export(given, "--megatron", out, "--hf", out)
    assert code == 2 and "give one of --out DIR" in said
    code, said = export(given, "--megatron", out, "--tokenizer", given)
    assert code == 2 and "give that in the place of --megatron" in said
    code, said = export(given, "--megatron", given)
    assert code == 2 and "holds files already" in said
    assert not out.exists()


def test_models_whose_keys_are_not_known(tmp_path: Path) -> None:
    _, weights, notes = model("llama")
    latent = {**notes.transformer, "multi_latent_attention": True}
    cases = [
        (with_notes(notes, kind="MambaModel"), "the model is a MambaModel, and dsx writes"),
        (with_notes(notes, transformer=latent), "multi_latent_attention=True: dsx writes Mega"),
    ]
    for index, (told, message) in enumerate(cases):
        base = save_run(tmp_path / str(index), cut_llama(TINY, weights), told)
        code, said = export(base, "--megatron", tmp_path / "out")
        assert code == 2 and message in said, said
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            str(n) for n in range(index + 1)
        ]


LAYOUTS = [
    ("gpt2", Kind(tensor=2, pipeline=2, layers_per_stage=2)),
    ("llama", Kind(family="llama", pipeline=2, chunks=2)),
    ("qwen3", Kind(family="qwen3", tensor=2, layers_per_stage=4)),
    ("mixtral", Kind(family="mixtral", pipeline=2, experts=EXPERTS, expert_parallel=2)),
    (
        "qwen2_moe",
        Kind(family="qwen2_moe", tensor=2, layers_per_stage=4, experts=EXPERTS, expert_parallel=4,
             expert_tensor=1),
    ),
    ("qwen3_moe", Kind(family="qwen3_moe", tensor=2, pipeline=2, experts=EXPERTS)),
]  # fmt: skip


FROM_A_FOLDER = ("llama", "mixtral", "qwen2_moe")  # the others are written from the run's files


def load_all(base: str) -> list[Any]:
    """Load each checkpoint into a model of another layout; return its weights and logits."""
    from megatron.core import dist_checkpointing

    from tests.engines.test_megatron_export import logits

    found: list[Any] = []
    for name, kind in LAYOUTS:
        engine = build_inner(kind, seed=7)
        path = f"{base}/{name}/{RELEASE}"
        common: Any = dist_checkpointing.load_common_state_dict(path)
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        wanted = {
            f"model{i}": chunk.module.sharded_state_dict(metadata=dict(metadata or {}))
            for i, chunk in enumerate(engine.chunks)
        }
        state: Any = dist_checkpointing.load(wanted, path)
        for i, chunk in enumerate(engine.chunks):
            chunk.module.load_state_dict(state[f"model{i}"])
        weights = {n: w.numpy() for n, w in whole_weights(engine).items()}
        found.append((weights, logits(engine)))
    dist.barrier()
    return found


@pytest.mark.ci
@needs_megatron
@needs("transformers")
def test_megatron_loads_it_in_another_layout(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.engines.test_megatron_export import tokens

    for name, _ in LAYOUTS:
        base = saved(tmp_path / f"run_{name}", name)
        assert export(base, "--out", tmp_path / f"own_{name}")[0] == 0
        code, said = export(base, "--hf", tmp_path / f"hf_{name}")
        assert code == 0, said
        source = tmp_path / f"hf_{name}" if name in FROM_A_FOLDER else base
        code, said = export(source, "--megatron", tmp_path / name)
        assert code == 0, said
    everyone = run_distributed(load_all, 8, str(tmp_path), timeout_seconds=500, engine="megatron")
    for index, (name, _) in enumerate(LAYOUTS):
        weights, logits = everyone[-1][index]
        own = load_file(tmp_path / f"own_{name}" / "model.safetensors")
        assert {n.removeprefix("decoder.") for n in own} == weights.keys(), name
        for key, tensor in own.items():
            found = weights[key.removeprefix("decoder.")]
            if ".linear_fc1." in key and name != "gpt2":
                kind = LAYOUTS[index][1]
                is_expert = ".experts." in key
                count = kind.expert_tensor if is_expert else None
                halves = np.split(found, 2 * (count or kind.tensor))
                found = np.concatenate(halves[::2] + halves[1::2])
            rows = IN_USE if key.startswith(("embedding.word", "output_layer")) else None
            assert np.array_equal(tensor.numpy()[:rows], found[:rows]), (name, key)
        theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf_{name}").eval()
        for micro in range(MICRO_BATCHES):
            with torch.no_grad():
                expected = theirs(tokens(micro)).logits.numpy()
            assert np.abs(expected - logits[micro][..., :IN_USE]).max() < 1e-5, name


@pytest.mark.ci
def test_memory_is_that_of_some_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(
        layers=12, hidden=512, heads=8, groups=4, head=64, ffn=1024, vocab=3000, rows=3072, length=8
    )
    weights = cut_llama(shape, llama_weights(shape))
    base = save_run(tmp_path / "run", weights, notes_of(shape, True))
    total = 4 * sum(w.numel() for w in weights.values())
    layer = 4 * sum(w.numel() for name, w in weights.items() if ".layers.3." in name)
    assert total > 10 * layer
    del weights
    held: list[int] = []
    trim = ctypes.CDLL(None).malloc_trim
    made = _Streamed.resolve_data

    def resolve(self: Any, item: Any) -> Any:
        found = made(self, item)
        trim(0)  # what malloc keeps of what was freed is not held
        held.append(anonymous_bytes())
        return found

    monkeypatch.setattr(_Streamed, "resolve_data", resolve)
    export(saved(tmp_path / "small", "llama"), "--megatron", tmp_path / "warm")  # what it imports
    trim(0)
    before = anonymous_bytes()
    held.clear()
    code, said = export(base, "--megatron", tmp_path / "out")
    assert code == 0, said
    assert max(held) - before < 3 * layer, (max(held) - before, layer, total)
