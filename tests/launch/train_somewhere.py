"""A DeepSpeed script without dsx that goes on from what was saved, for tests of schedulers."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.nn.functional import mse_loss

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--resume", metavar="DIR")
parser.add_argument("--out", required=True)
args: Any = parser.parse_args()

torch.manual_seed(0)
model, data = torch.nn.Linear(6, 6), torch.utils.data.TensorDataset(*torch.randn(2, 256, 6))
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
if args.resume:
    engine.load_checkpoint(args.resume)
began = engine.global_steps
for x, y in loader:
    if engine.global_steps == args.steps:
        break
    engine.backward(mse_loss(engine(x), y))
    engine.step()
    print(f"step {engine.global_steps}", flush=True)
    time.sleep(args.step_seconds)
engine.save_checkpoint(f"{args.out}/saved", tag="last")
weights = sum(p.double().abs().sum().item() for p in engine.module.parameters())
name = f"{os.environ['DSX_CLUSTER_ID']}.{os.environ['RANK']}.json"
Path(args.out, name).write_text(json.dumps({"began": began, "weights": weights}))
