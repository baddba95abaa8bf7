"""`dsx export` of an unmodified `pretrain_gpt.py`: `--megatron-lm=PATH -m slow`.

Megatron's own checkpoint of the finished run is the oracle: its format puts slices together itself.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from tests.checkpoint.test_averaged_model import export
from tests.installed import needs
from tests.launch import test_megatron_lm
from tests.launch.test_megatron_lm import BLOCKING, pretrain, tree, vocabulary

__all__ = ["tree"]  # the fixture

STEPS = 5
IN_FILES = {  # where Megatron's checkpoints have Transformer Engine's names
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
LLAMA = shlex.split("""
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights
    --ffn-hidden-size 48 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --no-bias-swiglu-fusion --no-rope-fusion
""")


def of_megatron(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a torch_dist checkpoint, whole, layers one above the other."""
    reader = FileSystemReader(directory)
    described = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if name.startswith(("decoder.", "embedding.", "output_layer."))
        and hasattr(entry, "size")
        and "_extra_state" not in name
    }
    load(state, storage_reader=reader)
    return state


@pytest.mark.slow
@needs("transformers")
@pytest.mark.timeout(900)
def test_a_finished_run_becomes_one_model(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(test_megatron_lm, "DSX", BLOCKING)
    save = ["--save", str(tmp_path / "{cluster_id}"), "--save-interval", str(STEPS)]
    pretrain(tree, tmp_path / "logs", *LLAMA, "--train-iters", str(STEPS), *save, ranks=4)
    theirs = of_megatron(tmp_path / f"0/iter_{STEPS:07d}")
    weights: list[dict[str, Tensor]] = []
    for cluster in range(2):
        code, said = export(tmp_path / str(cluster), "--out", tmp_path / f"own{cluster}")
        assert code == 0, said
        weights.append(load_file(tmp_path / f"own{cluster}" / "model.safetensors"))
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    seen: set[str] = set()
    for name, tensor in weights[0].items():
        if name.startswith("decoder.layers."):
            number, inside = name.removeprefix("decoder.layers.").split(".", 1)
            inside = IN_FILES.get(inside, inside)
            seen.add(f"decoder.layers.{inside}")
            expected = theirs[f"decoder.layers.{inside}"][int(number)]
        else:
            seen.add(name)
            expected = theirs[name][: len(tensor)]  # which is not padded there
            tensor = tensor[: len(expected)]
        assert tensor.equal(expected), name
    assert seen == theirs.keys()
    code, said = export(tmp_path / "0", "--hf", tmp_path / "hf")
    tokens = vocabulary(tree)
    assert code == 0 and f"vocabulary: {tokens:,} of 4,352 rows" in said, said
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"]) == ("llama", 2)
    model: Any
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    assert model(torch.arange(16)[None]).logits.shape == (1, 16, tokens)
