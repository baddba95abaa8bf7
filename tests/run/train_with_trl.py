"""A script of somebody who fine-tunes with TRL and has not heard of dsx: SFT or DPO, with LoRA.

Its DeepSpeed config is known to the script only, as in a YAML of a program that calls TRL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

SAMPLES, WORDS = 32, 30


def make_tokenizer() -> Any:
    words = {**{f"w{i}": i for i in range(WORDS)}, "<eos>": WORDS, "<pad>": WORDS + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + 2, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, eos_token_id=WORDS,
            pad_token_id=WORDS + 1,
        )
    )  # fmt: skip


def sentence(number: int) -> str:
    return " ".join(f"w{(number * k + k) % WORDS}" for k in range(1, 7))


def main() -> None:
    kind, config = sys.argv[1], json.loads(Path("settings.txt").read_text())
    common: dict[str, Any] = {
        "output_dir": "runs", "deepspeed": config, "max_steps": 8, "learning_rate": 0.02,
        "per_device_train_batch_size": 2, "report_to": "none", "logging_steps": 4,
        "save_strategy": "no", "disable_tqdm": True, "max_length": 32, "bf16": False,
        "eval_strategy": "steps", "eval_steps": 4, "dataloader_pin_memory": False,
    }  # fmt: skip
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    shared: dict[str, Any] = {
        "model": make_model(), "processing_class": make_tokenizer(), "peft_config": lora
    }  # fmt: skip
    numbers = range(SAMPLES)
    if kind == "sft":
        data = Dataset.from_dict({"text": [sentence(i) for i in numbers]})
        trainer = SFTTrainer(
            args=SFTConfig(**common), train_dataset=data, eval_dataset=data, **shared
        )
    else:
        columns = {
            "prompt": ["w1 w2"] * SAMPLES,
            "chosen": [" " + sentence(i) for i in numbers],
            "rejected": [" " + sentence(i + 7) for i in numbers],
        }
        data = Dataset.from_dict(columns)
        trainer = DPOTrainer(
            args=DPOConfig(**common), train_dataset=data, eval_dataset=data, **shared
        )
    trainer.train()
    trainer.save_model()
    adapters = {n: p for n, p in trainer.model.named_parameters() if "lora_" in n}
    told = {
        "steps": trainer.state.global_step,
        "samples": len(trainer.train_dataset),
        "evaluated": len(trainer.eval_dataset),
        "norm": sum(p.double().pow(2).sum().item() for p in adapters.values()),
        "trained": sum(p.numel() for p in adapters.values()),
        "all": sum(p.numel() for p in trainer.model.parameters()),
    }
    (Path(trainer.args.output_dir) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
