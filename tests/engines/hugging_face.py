"""Tiny Hugging Face models, made from configurations alone, and their data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 48
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": False},
    "llama, tied": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": False},
    "qwen3, tied": {"model_type": "qwen3", **_SIZES, "head_dim": 4, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", **_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def make_model(name: str, seed: int = 0) -> Any:
    """Return a causal language model with random weights, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))


def make_tokenizer() -> Any:
    """Return a tokenizer that needs no download: a word for each number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(WordLevel({**words, "<unk>": VOCABULARY - 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def tokens(cluster: int, step: int, part: int = 0) -> Tensor:
    """Return a batch of tokens, [2, 12], another for each cluster, step and part."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * cluster + part)
    return torch.randint(0, VOCABULARY, (2, 12), generator=generator)


def loss(model: Any, cluster: int, step: int) -> Tensor:
    """Return a model's loss on one batch."""
    batch = tokens(cluster, step)
    return model(input_ids=batch, labels=batch).loss


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Return what a model makes of a batch that is nobody's, [2, 12, vocabulary], fp32."""
    return model.eval()(input_ids=tokens(9, 99)).logits.float()
