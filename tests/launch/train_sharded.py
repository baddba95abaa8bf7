"""Plain PyTorch, sharded over a cluster's ranks by `fully_shard`; started by the launch tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import dsx  # noqa: E402
from tests.fsdp2_on_cpu import serve_fsdp2  # noqa: E402
from tests.launch.until_stopped import arguments, train  # noqa: E402
from tests.tiny import TinyNet, batch  # noqa: E402

serve_fsdp2()
args = arguments()
world = dsx.init_distributed(args.deepspeed_config, args)
model = TinyNet(world.cluster_id)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world.world_size,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
handle = dsx.attach(model, optimizer, config=args.deepspeed_config)


def take_step(step: int) -> float:
    optimizer.zero_grad()
    loss = model(*batch(world.cluster_id, step, world.rank))
    loss.backward()
    optimizer.step()
    return loss.item()


train(handle, take_step, lambda: (p.to_local() for p in model.parameters()), args)
