"""Fine-tune a small Llama with TRL's SFT and LoRA: only the adapters travel."""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def main() -> None:
    (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    lines = [line for line in Path("README.md").read_text().splitlines() if len(line.split()) > 3]
    words = sorted({word for line in lines for word in line.split()})
    numbers = {word: i for i, word in enumerate([*words, "<eos>", "<pad>"])}
    raw = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(numbers), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=numbers["<eos>"],
        pad_token_id=numbers["<pad>"],
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_dict({"text": lines}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model("runs/example_trl/final")
    norm = sum(float(p.detach().double().square().sum()) for p in trainer.model.parameters())
    print(f"norm of the model {norm:.9f}", flush=True)


if __name__ == "__main__":
    main()
