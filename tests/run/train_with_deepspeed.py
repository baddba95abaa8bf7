"""A script of somebody who has not heard of dsx, in the manner of DeepSpeed's examples."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES, WIDTH, BATCH = 64, 6, 2


class Samples(Dataset[Any]):
    """Vectors to be learned in reverse, each with its number."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].flip(0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--own-loader", action="store_true")
    parser.add_argument("--out", required=True)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    data, model = Samples(), make_model()
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=None if args.own_loader else data,
    )
    if args.own_loader:
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    read: list[int] = []
    for numbers, x, y in loader:
        read += numbers.tolist()
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    validation = len(DistributedSampler(data, shuffle=False))
    engine.save_checkpoint(args.out, tag="last")
    told = {"read": read, "validation": validation, "world": dist.get_world_size()}
    Path(f"{args.out}.{dist.get_rank()}.json").write_text(json.dumps(told))
    if args.own_loader:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
