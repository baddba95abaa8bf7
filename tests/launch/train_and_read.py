"""One rank of one cluster: trains a little on numbered samples, saves, and writes down which."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import dsx
from dsx.data import ClusterBatches
from tests.data.test_cluster_batches import Numbers

job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
cluster = int(sys.argv[2])
config, folder = job["configs"][cluster], Path(job["folder"])
num_clusters = len(job["configs"])
dsx.init_distributed(config)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
handle = dsx.attach(model, optimizer, config=config)
batches = ClusterBatches(
    Numbers(240), 1, cluster_id=cluster, num_clusters=num_clusters, rank=0, world_size=1, seed=0
)
handle.track(data=batches)
if job["load"]:
    source = cluster if cluster < job["saved_by"] else 0
    saved = folder / f"{job['load']}_{source}"
    handle.load(saved, is_new=source != cluster, is_other_number=True)
read: list[int] = []
while handle.step < job["steps"]:
    batch = next(batches)
    read.append(int(batch[0, 0]))
    optimizer.zero_grad()
    model(batch.float() / 240).square().mean().backward()
    optimizer.step()
(folder / f"{job['name']}_{cluster}").mkdir()
handle.save(folder / f"{job['name']}_{cluster}")
(folder / f"{job['name']}_{cluster}.json").write_text(json.dumps(read))
handle.finish()
handle.close()
