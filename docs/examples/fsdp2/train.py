"""Predict the next byte of README.md, sharded by `fully_shard` (FSDP2)."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH = 32


class Bytes(Dataset):
    """Runs of a file's bytes."""

    def __init__(self, path: str) -> None:
        self.text = torch.tensor(list(Path(path).read_bytes()))

    def __len__(self) -> int:
        return len(self.text) - LENGTH

    def __getitem__(self, start: int) -> torch.Tensor:
        return self.text[start : start + LENGTH + 1]


def make_model() -> nn.Module:
    """Return a model of the byte that follows the last LENGTH ones."""
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 128), nn.ReLU(),
        nn.Linear(128, 256),
    )  # fmt: skip


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Bytes("README.md")
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = make_model()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[2], model[4], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
for step, batch in enumerate(loader, start=1):
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.2f}", flush=True)
    if step == 100:
        break
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if dist.get_rank() == 0:
    norm = sum(float(tensor.double().square().sum()) for tensor in state.values())
    print(f"norm of the model {norm:.9f}", flush=True)
dist.destroy_process_group()
