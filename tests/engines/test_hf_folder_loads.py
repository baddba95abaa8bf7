"""What `dsx export --hf` writes, loaded by transformers in one line: the same logits to the bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsx.config.schema import preset
from dsx.engines.simulated import SimulatedClusters
from tests.checkpoint.test_averaged_model import checkpoint, export
from tests.engines.hugging_face import CONFIGS, logits, loss, make_model, make_tokenizer
from tests.installed import needs

pytestmark = [needs("transformers"), pytest.mark.ci]


class Trained(SimulatedClusters):
    """Two clusters that have trained a model of transformers for some steps."""

    def __init__(self, name: str, num_steps: int, method: str = "streaming_diloco") -> None:
        models = [copy.deepcopy(make_model(name)) for _ in range(2)]
        chosen = preset(method, 2, schedule={"interval": 4})
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
        super().__init__(models, optimizers, chosen)
        for _ in range(num_steps):
            self.train_step(loss)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """Return a new model with the same weights in another type; what it computes stays fp32."""
    other = type(model)._from_config(model.config, dtype=dtype)
    other.load_state_dict({name: weight.to(dtype) for name, weight in model.state_dict().items()})
    return other


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_average(name: str, tmp_path: Path) -> None:
    run = Trained(name, 6)
    model = run.models[0]
    model.config.save_pretrained(tmp_path / "start")
    make_tokenizer().save_pretrained(tmp_path / "start")
    base = checkpoint(run, tmp_path)
    for dtype, shards in (("fp32", ["--max-shard-size", 4e-6]), ("bf16", [])):
        out = tmp_path / dtype
        arguments = ["--config", tmp_path / "start", "--dtype", dtype, *shards]
        code, said = export(base, "--hf", out, *arguments)
        assert code == 0, said
        assert f"all that {type(model).__name__} of transformers" in said.replace("\n", " ")
        loaded, told = load(out)
        assert not any(told.values()), told
        assert (out / "model.safetensors.index.json").is_file() == bool(shards)
        with run.averaged() as average:
            expected = rounded(average, loaded.dtype)
        assert loaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert torch.equal(logits(loaded), logits(expected))
        assert not torch.equal(logits(loaded), logits(rounded(model, loaded.dtype)))
    names = [n for file in (tmp_path / "fp32").glob("*.safetensors") for n in load_file(file)]
    assert ("lm_head.weight" in names) == (not CONFIGS[name].get("tie_word_embeddings", True))
    assert len(names) == len(set(names)) == len(list(model.parameters()))


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard
    from transformers import AutoTokenizer

    run = Trained("gpt2", 4, "diloco")
    run.models[0].config.save_pretrained(tmp_path / "start")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    arguments = ["--config", tmp_path / "start", "--tokenizer", tmp_path / "tokenizer"]
    code, said = export(checkpoint(run, tmp_path), "--hf", tmp_path / "out", *arguments)
    assert code == 0, said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w3 w1 w40").input_ids == [3, 1, 40]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers" and card.data.tags == ["dsx"]
    assert "GPT2LMHeadModel of transformers" in card.text


def test_another_model_s_config_is_refused_by_name(tmp_path: Path) -> None:
    run = Trained("llama", 4, "diloco")
    base = checkpoint(run, tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_hidden_layers": 3}, "missing in the run: model.layers.2.input_layernorm.weight, "),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1.input_layernorm.weight, "),
        ({"vocab_size": 50}, "lm_head.weight is [48, 16] in the run and [50, 16] there"),
        ({"tie_word_embeddings": True}, "ties lm_head.weight to model.embed_tokens.weight, and "),
        ({"model_type": "qwen2"}, "missing in the run: model.layers.0.self_attn.k_proj.bias"),
        ({"model_type": "gpt5000"}, "has no causal language model of model_type 'gpt5000'"),
        ({"model_type": "clip_vision_model"}, "no causal language model of model_type 'clip_vis"),
        ({"hidden_size": "wide"}, "cannot read it"),
    ]
    for changes, message in cases:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], **changes}))
        code, said = export(base, "--hf", tmp_path / "out", "--config", tmp_path)
        assert code == 2 and message in said, (changes, said)
        assert not (tmp_path / "out").exists()


def test_experts_that_transformers_joins_as_it_loads_them_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 joins them")

    base = checkpoint(Trained("llama", 4, "diloco"), tmp_path)
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1}
    settings = {**CONFIGS["llama"], **experts, "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code, said = export(base, "--hf", tmp_path / "out", "--config", tmp_path)
    assert code == 2 and "model.save_pretrained(DIR) inside" in said, said
