"""Predict the next byte of README.md, in a loop over Accelerate."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 32

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
text = torch.tensor(list(Path("README.md").read_bytes()))
data = TensorDataset(text.unfold(0, LENGTH + 1, 1))
model = nn.Sequential(
    nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 128), nn.ReLU(), nn.Linear(128, 256)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (batch,) in enumerate(loader, start=1):
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if step % 50 == 0 and accelerator.is_main_process:
        print(f"step {step}: loss {loss:.2f}", flush=True)
    if step == 100:
        break
accelerator.end_training()
norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
if accelerator.is_main_process:
    print(f"norm of the model {norm:.9f}", flush=True)
