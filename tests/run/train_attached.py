"""A loop in plain PyTorch that attaches itself, and saves by `dsx.TorchCheckpoints`.

python train_attached.py CONFIG [--resume], in a launch of both clusters; writes `told_<m>.<r>.json`
here, and checkpoints to `runs`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dsx


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    world = dsx.init_distributed(config)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    model = DistributedDataParallel(net) if world.world_size > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    checkpoints = dsx.TorchCheckpoints(handle)
    if "--resume" in sys.argv:
        checkpoints.load("runs")
    for step in range(handle.step + 1, 13):
        torch.manual_seed(1000 * step + 10 * world.cluster_id + world.rank)
        x = torch.randn(4, 6)
        nn.functional.mse_loss(model(x), x.flip(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            checkpoints.save("runs")
    handle.finish()
    checkpoints.save("runs")
    with handle.averaged():
        own = {name: tensor.tolist() for name, tensor in net.state_dict().items()}
    told = {"own": own, "after": {}}
    Path(f"told_{world.cluster_id}.{world.rank}.json").write_text(json.dumps(told))
    handle.close()


if __name__ == "__main__":
    main()
