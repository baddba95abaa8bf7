"""A loop of somebody who uses Accelerate and has not heard of dsx, as its complete examples are.

With checkpoints by steps or epochs, a resume that skips batches, accumulation, clipping, a schedule
whose length is taken from the loader, metrics gathered over the ranks, and an early stop.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES, HELD_OUT, WIDTH, BATCH = 64, 22, 6, 2


class Samples(Dataset[Any]):
    """Vectors to be learned in reverse, each with its number."""

    def __init__(self, count: int, seed: int) -> None:
        self.x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(index), self.x[index], self.x[index].flip(0)


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return (self.samples[i] for i in range(len(self.samples)))


class Block(nn.Sequential):
    """A layer that is wrapped by itself where the model is sharded."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(nn.Linear(WIDTH, 8), nn.GELU()), Block(nn.Linear(8, WIDTH)))


def get_dataloaders(args: Any) -> tuple[Any, Any]:
    train: Any = Samples(SAMPLES, 1)
    if args.stream:
        train = DataLoader(Stream(train), batch_size=BATCH)
    else:
        train = DataLoader(train, shuffle=not args.in_order, batch_size=BATCH)
    return train, DataLoader(Samples(HELD_OUT, 2), batch_size=4)


def make_accelerator(args: Any) -> Accelerator:
    own: dict[str, Any] = {}
    if args.fsdp:
        from accelerate import FullyShardedDataParallelPlugin

        own["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=args.fsdp, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )  # fmt: skip
    return Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulation,
        dataloader_config=DataLoaderConfiguration(
            split_batches=args.split_batches, use_seedable_sampler=True
        ),
        project_config=ProjectConfiguration(
            project_dir=args.out, automatic_checkpoint_naming=args.automatic, total_limit=2
        ),
        **own,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--split_batches", action="store_true")
    parser.add_argument("--automatic", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--in_order", action="store_true")
    parser.add_argument("--fsdp", type=int, default=0)
    parser.add_argument("--max_norm", type=float, default=0.0)
    parser.add_argument("--steps_between", type=int, default=0)
    parser.add_argument("--folder", default="step_{}")
    parser.add_argument("--resume")
    parser.add_argument("--stops_here", type=int)
    parser.add_argument("--step_seconds", type=float, default=0.0)
    parser.add_argument("--told", default="told")
    args = parser.parse_args()
    accelerator = make_accelerator(args)
    set_seed(42)
    train, held_out = get_dataloaders(args)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    total = 40 if args.stream else len(train) * args.epochs // args.accumulation
    scheduler: Any = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    model, optimizer, train, held_out, scheduler = accelerator.prepare(
        model, optimizer, train, held_out, scheduler
    )
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    read: list[list[int]] = []
    rates: list[float] = []
    metrics: list[dict[str, float]] = []
    first_epoch, skipped = 0, 0
    if args.resume == "newest":
        accelerator.load_state()
    elif args.resume:
        accelerator.load_state(args.resume)
        first_epoch, skipped = divmod(seen.batches, len(train))
    overall, is_stopped = first_epoch * (0 if args.stream else len(train)) + skipped, False
    for epoch in range(first_epoch, args.epochs):
        model.train()
        train.set_epoch(epoch)
        batches = train
        if epoch == first_epoch and skipped:
            batches = accelerator.skip_first_batches(train, skipped)
        for numbers, x, y in batches:
            read.append(numbers.tolist())
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_norm)
                rates.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            overall += 1
            seen.batches += 1
            if args.step_seconds:
                print(f"AT {overall}", flush=True)
                time.sleep(args.step_seconds)
            if args.steps_between and overall % args.steps_between == 0:
                accelerator.save_state(
                    None if args.automatic else os.path.join(args.out, args.folder.format(overall))
                )
            if args.stops_here is not None:
                if overall == 5 and args.stops_here:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    is_stopped = True
                    break
        metrics.append(evaluate(accelerator, model, held_out))
        if is_stopped:
            break
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(args.out, "model"))
    own = accelerator.get_state_dict(model)
    after = {}
    if not args.fsdp:  # sharded weights are gathered by ranks that are still together
        accelerator.end_training()
        after = accelerator.unwrap_model(model).state_dict()
    told = {
        "read": read, "rates": rates, "metrics": metrics, "world": accelerator.num_processes,
        "kind": str(accelerator.distributed_type), "seen": seen.batches, "steps": overall,
        "own": {name: tensor.tolist() for name, tensor in own.items()},
        "after": {name: tensor.tolist() for name, tensor in after.items()},
    }  # fmt: skip
    Path(f"{args.told}.{accelerator.process_index}.json").write_text(json.dumps(told))
    if args.fsdp:
        accelerator.end_training()


class Seen:
    """What the script counts itself, in each checkpoint."""

    batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def evaluate(accelerator: Any, model: Any, held_out: Any) -> dict[str, float]:
    """Return how many samples were evaluated, each once, and their loss."""
    model.eval()
    numbers: list[int] = []
    losses: list[Tensor] = []
    for index, x, y in held_out:
        with torch.no_grad():
            each = (model(x) - y).square().mean(1)
        index, each = accelerator.gather_for_metrics((index, each))
        numbers += index.tolist()
        losses.append(each)
    assert len(numbers) == len(set(numbers)), numbers
    return {"count": len(numbers), "loss": torch.cat(losses).mean().item()}


if __name__ == "__main__":
    main()
