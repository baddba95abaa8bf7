"""A script of somebody who uses the Hugging Face Trainer and has not heard of dsx."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HubDataset
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SAMPLES, LENGTH, VOCABULARY = 32, 8, 32
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


@dataclass
class Script:
    """The script's own options."""

    out: str
    data: str = "map"  # map | hub | stream
    stops_in: int = 0  # the cluster whose callback stops at `stops_at`
    stops_at: int = 0
    step_seconds: float = 0.0


class Sentences(Dataset[Any]):
    """Sentences of numbers; `read` are those that were asked for."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(int(index))
        return {"input_ids": self.x[index], "labels": self.x[index]}


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, sentences: Sentences) -> None:
        self.sentences = sentences

    def __iter__(self) -> Any:
        return (self.sentences[i] for i in range(SAMPLES))


class Stop(TrainerCallback):
    """Stops the training of whoever asks for it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            control.should_training_stop = True


class Slow(TrainerCallback):
    """Takes its time, and says where it is."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.seconds:
            print(f"AT {state.global_step}", flush=True)
            time.sleep(self.seconds)


class Batches(TrainerCallback):
    """Notes the steps that were taken and what was evaluated."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses[state.global_step] = kwargs["metrics"]["eval_loss"]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES, **heads))


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Script))
    arguments, script = parser.parse_args_into_dataclasses()
    train, held_out = Sentences(1), Sentences(2)
    data: Any = {
        "map": train,
        "stream": Stream(train),
        "hub": HubDataset.from_dict({"input_ids": train.x.tolist(), "labels": train.x.tolist()}),
    }[script.data]
    noted = Batches()
    trainer = Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=data,
        eval_dataset=held_out,
        callbacks=[
            noted,
            Slow(script.step_seconds),
            *([Stop(script.stops_at)] if script.stops_in else []),
        ],
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint or None)
    read = list(train.read)
    after = trainer.evaluate()["eval_loss"] if arguments.eval_strategy != "no" else None
    trainer.save_model()
    trainer.save_model(script.out)
    told = {
        "read": read,
        "evaluated": held_out.read,
        "steps": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "losses": noted.losses,
        "after": after,
        "world": arguments.world_size,
        "norm": sum(p.double().pow(2).sum().item() for p in trainer.model.parameters()),
    }
    file = Path(arguments.output_dir) / f"told.{arguments.process_index}.json"
    file.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
