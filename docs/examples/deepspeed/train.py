"""Predict the next byte of README.md, with DeepSpeed and ZeRO-2."""

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn

LENGTH = 32
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
torch.manual_seed(0)
text = torch.tensor(list(Path("README.md").read_bytes()))
data = torch.utils.data.TensorDataset(text.unfold(0, LENGTH + 1, 1))
model = nn.Sequential(
    nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 128), nn.ReLU(), nn.Linear(128, 256)
)
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
for step, (batch,) in enumerate(loader, start=1):
    batch = batch.to(engine.device)
    loss = nn.functional.cross_entropy(engine(batch[:, :-1]), batch[:, -1])
    engine.backward(loss)
    engine.step()
    if step % 50 == 0 and engine.local_rank == 0:
        print(f"step {step}: loss {loss:.2f}", flush=True)
    if step == 100:
        break
engine.save_checkpoint("runs/example_deepspeed/checkpoints", tag="last")
if engine.global_rank == 0:
    norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
    print(f"norm of the model {norm:.9f}", flush=True)
