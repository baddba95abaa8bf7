"""A DeepSpeed pipeline of two stages, whose ends share a weight; started by the launch tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed  # noqa: E402, F401 - which then joins the world
import torch  # noqa: E402

import dsx  # noqa: E402
from tests.engines.pipelines import Kind, make_module, train_batch  # noqa: E402
from tests.launch.until_stopped import arguments, train  # noqa: E402

args = arguments()
world = dsx.init_distributed(args.deepspeed_config, args)
model = make_module(Kind(1, is_tied=True), world.cluster_id, num_stages=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = dsx.initialize(args=args, model=model, optimizer=optimizer)
train(engine.dsx, lambda step: train_batch(engine, step), lambda: engine.module.parameters(), args)
