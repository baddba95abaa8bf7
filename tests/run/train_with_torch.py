"""A script of somebody who has not heard of dsx, in the manner of PyTorch's tutorials."""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES, WIDTH, BATCH, LR = 64, 6, 2, 0.01


class Samples(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Vectors to be learned in reverse, each with its number."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.x[index].flip(0)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ddp", "fully_shard"), required=True)
    parser.add_argument("--second-model", action="store_true")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    launched_as = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="gloo", timeout=timedelta(seconds=120))
    data, model = Samples(), make_model()
    held = list(model.parameters())
    if args.engine == "fully_shard":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        wrapped: nn.Module = fully_shard(model, mesh=mesh)
        held = list(model.parameters())
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=LR)
    read: list[int] = []
    for numbers, x, y in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        read += numbers.tolist()
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
        if args.second_model:
            other = nn.Linear(2, 2)
            other(torch.ones(2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    dist.destroy_process_group()
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in held]  # type: ignore[operator]
    torch.save([w.detach() for w in weights], Path(args.out) / f"weights_{launched_as}.pt")
    (Path(args.out) / f"read_{launched_as}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main()
