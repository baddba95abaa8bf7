"""Hugging Face to an unmodified `pretrain_gpt.py` and back: `--megatron-lm=PATH -m slow`.

A folder becomes a checkpoint, which two clusters train on from; their average becomes a folder, and
a checkpoint that another layout loads. With a learning rate of zero that one saves what it loaded.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_averaged_model import export
from tests.installed import needs
from tests.launch import test_megatron_lm
from tests.launch.test_megatron_lm import BLOCKING, pretrain, tree, vocabulary
from tests.launch.test_megatron_lm_export import of_megatron

__all__ = ["tree"]  # the fixture

STEPS = 5
COMMON: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
    "initializer_range": 0.2,
}  # fmt: skip
LOCAL = ["--no-bias-swiglu-fusion", "--no-rope-fusion"]
TP, PP = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
EP = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]


@pytest.mark.slow
@needs("transformers")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "more", "first", "other"),
    [
        ("llama", {}, TP, PP),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, EP, PP),
    ],
)
def test_there_and_back(
    kind: str,
    more: dict[str, Any],
    first: list[str],
    other: list[str],
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(test_megatron_lm, "DSX", BLOCKING)
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        kind, **COMMON, **more, vocab_size=vocabulary(tree), tie_word_embeddings=False
    )
    start: Any = AutoModelForCausalLM.from_config(config)
    start.save_pretrained(tmp_path / "hf0")
    code, said = export(tmp_path / "hf0", "--megatron", tmp_path / "start")
    assert code == 0, said
    flags = [*shlex.split((tmp_path / "start" / "flags.txt").read_text()), *LOCAL]

    def run(name: str, load: str, *layout: str) -> None:
        save = ["--save", str(tmp_path / name / "{cluster_id}"), "--save-interval", str(STEPS)]
        every = ["--train-iters", str(STEPS), *save, "--load", str(tmp_path / load)]
        pretrain(tree, tmp_path / f"logs_{name}", *flags, *every, *layout)

    run("trained", "start", *first)
    base = tmp_path / "trained" / "0"
    assert export(base, "--hf", tmp_path / "hf1")[0] == 0
    assert export(base, "--megatron", tmp_path / "next")[0] == 0
    run("again", "next", *other, "--lr", "0", "--min-lr", "0")
    loaded = of_megatron(tmp_path / "next" / "release")
    theirs = of_megatron(tmp_path / "again" / "0" / f"iter_{STEPS:07d}")
    apart = "decoder.layers.pre_mlp_layernorm.weight"  # of Transformer Engine's layers
    assert theirs.keys() == loaded.keys() - {apart}
    for name, tensor in theirs.items():
        rows = min(len(tensor), len(loaded[name]))  # of the vocabulary, which is padded otherwise
        assert tensor[:rows].equal(loaded[name][:rows]), name
    assert export(tmp_path / "again" / "0", "--hf", tmp_path / "hf2")[0] == 0
    before, after, again = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("hf0", "hf1", "hf2")
    )
    assert before.keys() == after.keys() == again.keys()
    assert all(after[name].equal(again[name]) for name in after)
    moved = [float((after[name] - before[name]).abs().max()) for name in after]
    assert min(moved) > 1e-3 and max(moved) < 0.5, moved  # trained, and from those weights
