"""Pretrain a small GPT: DeepSpeed inside each cluster, dsx between the clusters.

    dsx data build --from stdlib --out data/stdlib
    deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py \
        --deepspeed_config configs/quickstart.json

What dsx adds to a DeepSpeed script are `dsx.init_distributed`, `dsx.initialize` and the verbs of
`engine.dsx`: track, log_step, finish, averaged, gather. The run directory receives metrics.jsonl
(one more file per further cluster), plot.png, summary.json, checkpoints/ and the average of all
clusters as model.safetensors with model.json.

Terms: utilization = 1 - blocked / elapsed, where blocked is the time that training threads spent
inside dsx (copies, outer steps, waiting for other clusters; of a cluster's ranks the longest per
step counts) and elapsed is the wall time from the first step to the last transfer, evaluation
excluded. Losses are in nats per token. Bytes are payload handed to the network for other clusters.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file

import dsx
from dsx.data import BuildSummary, ClusterBatches, TokenWindows, read_summary
from dsx.report import format_bytes, plot


@dataclass(frozen=True)
class Counters:
    """What one cluster did over some steps."""

    steps: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    blocked_seconds: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))

    @property
    def loss(self) -> float:
        """Mean loss of the steps."""
        return self.loss_sum / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole cluster."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """Share of the time in which dsx did not hold up training."""
        return 1 - self.blocked_seconds / self.seconds if self.seconds else 1.0


@dataclass
class Run:
    """Everything a run is made of; built by `set_up`."""

    arguments: argparse.Namespace
    started: float
    run_dir: Path
    dataset: BuildSummary
    model: GPT
    world: dsx.World
    engine: Any
    batches: ClusterBatches
    validation: TokenWindows
    console: Console | None  # only the process that talks has one


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a small GPT on byte tokens with DeepSpeed and dsx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--data", type=Path, default=Path("data/stdlib"), help="built by `dsx data build`")
    add("--run-dir", type=Path, default=Path("runs/quickstart"), help="where results go")
    add("--steps", type=int, default=160, help="inner steps; the length of the LR schedule, too")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--sequence-length", type=int, default=128)
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--save-interval", type=int, default=0, help="steps between checkpoints; 0: at the end")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --run-dir")
    add("--validation-batches", type=int, default=16, help="micro batches per rank")
    add("--log-interval", type=int, default=10, help="steps per progress line")
    dsx.add_config_arguments(parser)
    arguments = parser.parse_args()
    smallest = {"steps": 1, "save_interval": 0, "validation_batches": 1, "log_interval": 1}
    for name, minimum in smallest.items():
        if getattr(arguments, name) < minimum:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} {getattr(arguments, name)} must be at least {minimum}")
    if not arguments.deepspeed_config:
        parser.error("--deepspeed_config FILE is required; try configs/quickstart.json")
    return arguments


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed JSON, with what the command line decides written into it."""
    dsx.load_config(arguments.deepspeed_config)  # its errors name the key and the fix
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    config["dsx"].setdefault("metrics", {})["dir"] = str(arguments.run_dir)
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = arguments.steps
    return config


def set_up(arguments: argparse.Namespace) -> Run:
    """Check the inputs, join the cluster's world, and build the engine.

    ValueError or FileNotFoundError says what is wrong with the inputs.
    """
    started = time.perf_counter()
    config = read_config(arguments)
    dataset = read_summary(arguments.data)
    train = TokenWindows(arguments.data / "train", arguments.sequence_length)
    validation = TokenWindows(arguments.data / "validation", arguments.sequence_length)
    shape = GPTConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=arguments.heads,
        sequence_length=arguments.sequence_length,
        vocab_size=dataset.vocab_size,
    )
    model = GPT(shape, arguments.seed)
    limit_threads()
    world = dsx.init_distributed(config, args=arguments)
    if not arguments.resume and world.rank == 0:
        set_aside(arguments.run_dir / "checkpoints" / f"cluster_{world.cluster_id}")
    engine, _, _, _ = dsx.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    batches = ClusterBatches(
        train,
        engine.train_micro_batch_size_per_gpu(),
        cluster_id=world.cluster_id,
        num_clusters=world.num_clusters,
        rank=world.rank,
        world_size=world.world_size,
        seed=arguments.seed,
    )
    engine.dsx.track(data=batches)
    if arguments.resume:
        engine.load_checkpoint(str(arguments.run_dir / "checkpoints"))
    talks = world.rank == 0 and (world.cluster_id == 0 or is_own_launcher(config, arguments))
    console = Console(highlight=False, soft_wrap=True) if talks else None
    return Run(
        arguments,
        started,
        arguments.run_dir,
        dataset,
        model,
        world,
        engine,
        batches,
        validation,
        console,
    )
