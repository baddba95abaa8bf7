"""Train a small Llama on the bytes of README.md with the Hugging Face Trainer."""

from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 32


class Bytes(torch.utils.data.Dataset):
    """Runs of a file's bytes."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.tensor(list(text))

    def __len__(self) -> int:
        return len(self.text) - LENGTH

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        tokens = self.text[start : start + LENGTH]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    text = Path("README.md").read_bytes()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config), arguments,
        train_dataset=Bytes(text[:-512]), eval_dataset=Bytes(text[-512:]),
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model("runs/example_trainer/final")
    norm = sum(float(p.detach().double().square().sum()) for p in trainer.model.parameters())
    print(f"norm of the model {norm:.9f}", flush=True)


if __name__ == "__main__":
    main()
