"""A training script as a user writes one, on the tiny model; the launch tests start it."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

import dsx
from tests.tiny import TinyNet, batch

faulthandler.register(signal.SIGUSR1)  # a test that waits in vain asks where this rank stands

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--save-dir")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--resume-if-saved", action="store_true")
parser.add_argument("--out")
parser.add_argument("--reads", type=Path)  # training_data, and writes down what of it is read
parser.add_argument("--stop-file", type=Path)  # asks for an early stop, once it is there
dsx.add_config_arguments(parser)
args = parser.parse_args()
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

world = dsx.init_distributed(args.deepspeed_config, args)
model = TinyNet(world.cluster_id)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = list(range(3600)) if args.reads else None
if args.reads:  # in this process: workers of each rank are many on a small machine
    io = DeepSpeedEngine.deepspeed_io
    DeepSpeedEngine.deepspeed_io = lambda *a, **k: io(*a, num_local_io_workers=0, **k)
engine, _, loader, _ = dsx.initialize(
    args=args, model=model, optimizer=optimizer, training_data=data
)
if args.resume or (args.resume_if_saved and Path(args.save_dir).is_dir()):
    engine.load_checkpoint(args.save_dir)
started_at = engine.dsx.step
batches = iter(loader) if args.reads else None
has_asked = False
while engine.dsx.step < args.steps:
    if args.stop_file and not has_asked and args.stop_file.exists():
        engine.dsx.request_stop("a file says so")
        has_asked = True
    if args.stop_file and engine.dsx.should_stop():
        break
    if batches is not None:
        read = {"step": engine.dsx.step + 1, "samples": next(batches).tolist()}
        with Path(f"{args.reads}.{world.cluster_id}.{world.rank}").open("a") as file:
            file.write(json.dumps(read) + "\n")
    loss = engine(*batch(world.cluster_id, engine.dsx.step + 1, world.rank))
    engine.backward(loss)
    engine.step()
    engine.dsx.log_step(loss=loss.item())
    if world.rank == 0 and args.step_seconds:
        print(f"step {engine.dsx.step}", flush=True)
    if args.save_dir and engine.dsx.step % 5 == 0:
        engine.save_checkpoint(args.save_dir, tag=f"step{engine.dsx.step}")
        if world.rank == 0:
            print(f"saved {engine.dsx.step}", flush=True)
    time.sleep(args.step_seconds)
engine.dsx.finish()
with engine.dsx.averaged():
    checksum = sum(p.double().abs().sum().item() for p in engine.module.parameters())
result = {"cluster": world.cluster_id, "started_at": started_at, "checksum": checksum}
result["step"] = engine.dsx.step
results = engine.dsx.gather(result)
if args.out and world.rank == 0:
    Path(f"{args.out}.{world.cluster_id}").write_text(json.dumps(results))
engine.dsx.close()
