"""A DeepSpeed engine that reads `training_data` by a schedule of rates; tells what it has read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import dsx  # noqa: E402
from tests.launch.numbered import Numbered, numbers_of  # noqa: E402
from tests.launch.until_stopped import arguments, train  # noqa: E402
from tests.tiny import WIDTH  # noqa: E402


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--hidden", type=int, default=WIDTH)


def rate_at(step: int) -> float:
    return 1 / (1 + step)


args = arguments(add)
world = dsx.init_distributed(args.deepspeed_config, args)
torch.manual_seed(world.cluster_id)
model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, args.hidden), torch.nn.Tanh(), torch.nn.Linear(args.hidden, WIDTH)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
engine, _, loader, _ = dsx.initialize(
    args=args, model=model, optimizer=optimizer, training_data=Numbered(), lr_scheduler=scheduler
)
read: dict[int, list[int]] = {}
batches = iter(loader)


def take_step(step: int) -> float:
    x, y = next(batches)
    read[step] = numbers_of(x)
    loss = F.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


def told() -> dict[str, object]:
    return {"read": read, "lr": optimizer.param_groups[0]["lr"]}


train(engine.dsx, take_step, lambda: engine.module.parameters(), args, told)
