"""Predict the next byte of README.md, with DistributedDataParallel."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
model = DistributedDataParallel(make_model())
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
rank = dist.get_rank()
dist.destroy_process_group()
norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
if rank == 0:
    print(f"norm of the model {norm:.9f}", flush=True)
