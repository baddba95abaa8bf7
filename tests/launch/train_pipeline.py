"""A DeepSpeed pipeline of two stages, whose ends share a weight, and what it has read."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed  # noqa: E402, F401 - which then joins the world
import torch  # noqa: E402

import dsx  # noqa: E402
from tests.engines.pipelines import Kind, make_module  # noqa: E402
from tests.launch.numbered import Numbered, numbers_of  # noqa: E402
from tests.launch.until_stopped import arguments, train  # noqa: E402

args = arguments()
world = dsx.init_distributed(args.deepspeed_config, args)
model = make_module(Kind(1, is_tied=True), world.cluster_id, num_stages=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = dsx.initialize(args=args, model=model, optimizer=optimizer, training_data=Numbered())
read: dict[int, list[int]] = {}


def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    read[engine.dsx.step + 1] = numbers_of(inputs[0])


if engine.is_first_stage():
    engine.module.forward_funcs[0].register_forward_pre_hook(note)


def told() -> dict[str, object]:
    return {"read": read, "engine_steps": engine.global_steps}


train(
    engine.dsx, lambda step: engine.train_batch().item(), lambda: engine.module.parameters(),
    args, told,
)  # fmt: skip
