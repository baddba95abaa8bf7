"""Pretrain a small GPT: DeepSpeed inside each cluster, dsx between the clusters.

    dsx data build --from stdlib --out data/stdlib
    deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py \
        --deepspeed_config configs/quickstart.json

With `--pipeline-stages N` each cluster is a pipeline of N stages (gpt_pipeline.py). Sizes may
stand in the JSON, too, as "pretrain_gpt"; those of configs/paper do, which `--scaled-down FILE`
trains in a small form (scaled_down.py). What dsx adds to a DeepSpeed script:
`dsx.init_distributed`, `dsx.initialize`, and the verbs of `engine.dsx`. The run directory receives
metrics.jsonl (one more file per further cluster), plot.png, summary.json, checkpoints/, and the
average of the clusters as model.safetensors. Units are said in training_run.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import save_file

import dsx
from dsx.config.files import read_json
from dsx.core.units import format_bytes
from dsx.data import BuildSummary, ClusterBatches, TokenWindows, read_summary, require_same
from dsx.examples.arguments import pretraining_arguments, require_heads
from dsx.examples.gpt import GPT, GPTConfig
from dsx.examples.gpt_pipeline import as_pipeline, gather_weights, with_targets
from dsx.examples.scaled_down import read_sizes, scale_down_json
from dsx.examples.torch_schedules import take_torch_schedule
from dsx.examples.training_run import (
    Counters,
    Meter,
    Results,
    conclude_run,
    open_bar,
    set_aside,
)


@dataclass
class Run:
    """What `set_up` has built."""

    arguments: argparse.Namespace
    dataset: BuildSummary
    validation: TokenWindows
    world: dsx.World
    engine: Any
    shape: GPTConfig
    num_parameters: int
    batches: ClusterBatches
    checkpoints: str
    console: Console | None  # only a process that reports has one

    @property
    def is_pipeline(self) -> bool:
        """Whether a rank holds one stage of the model only."""
        return self.arguments.pipeline_stages > 1

    @property
    def data_rank(self) -> int:
        """This rank among those that read other data than each other."""
        return dist.get_rank(self.engine.data_parallel_group)

    @property
    def num_data_ranks(self) -> int:
        """Return how many read data: in a pipeline, all stages of a replica read the same."""
        return self.engine.dp_world_size


def parse_arguments() -> argparse.Namespace:
    """Read the command line, with the arguments of DeepSpeed and of dsx."""
    parser = pretraining_arguments()
    dsx.add_config_arguments(parser)
    arguments = parser.parse_args()
    file, small = arguments.deepspeed_config, arguments.scaled_down
    if not file and not small:
        parser.error("--deepspeed_config FILE is required; try configs/quickstart.json")
    if file and small:
        parser.error("--scaled-down FILE takes the place of --deepspeed_config; give one of them")
    scaled = scale_down_json(small) if small else None
    document = read_json(file) if scaled is None else scaled.document
    parser.set_defaults(**(read_sizes(document, file) if scaled is None else scaled.sizes))
    arguments = parser.parse_args()  # what the command line says goes before the file
    arguments.document, arguments.scaled = document, scaled
    return arguments


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed JSON with what the command line decides written into it."""
    if "RANK" not in os.environ:
        raise ValueError("start this script with its launcher: deepspeed --num_gpus 4 SCRIPT ...")
    if not (arguments.data / "dataset.json").is_file():
        build = f"dsx data build --from stdlib --out {arguments.data}"
        raise ValueError(f"--data {arguments.data} is not a dataset; build one with: {build}")
    dsx.load_config(arguments.deepspeed_config or arguments.document)  # its errors name the fix
    config = json.loads(json.dumps(arguments.document))
    require_heads(arguments.hidden, arguments.heads)
    metrics = config["dsx"].setdefault("metrics", {})
    arguments.run_dir = arguments.run_dir or Path(metrics.get("dir") or "runs/pretrain_gpt")
    metrics["dir"] = str(arguments.run_dir)
    metrics["trace"] = arguments.trace or metrics.get("trace", False)
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = arguments.steps
    return config


def set_up(arguments: argparse.Namespace) -> Run:
    """Check the inputs, join the cluster's world, build the engine, resume if asked to.

    ValueError and FileNotFoundError say what is wrong with the inputs.
    """
    config = read_config(arguments)
    dataset = read_summary(arguments.data)
    train = TokenWindows(arguments.data / "train", arguments.sequence_length)
    validation = TokenWindows(arguments.data / "validation", arguments.sequence_length)
    size = (arguments.layers, arguments.hidden, arguments.heads, arguments.sequence_length)
    shape = GPTConfig(*size, dataset.vocab_size, qk_norm=arguments.qk_norm, z_loss=arguments.z_loss)
    model: Any = GPT(shape, arguments.seed)
    num_parameters = model.num_parameters()
    try:
        world = dsx.init_distributed(config, args=arguments)
    except dsx.PeerLost:
        raise
    except RuntimeError as error:  # a port that is taken, an environment that is none
        raise ValueError(str(error)) from error
    if arguments.pipeline_stages > 1:
        model = as_pipeline(model, arguments.pipeline_stages)
    engine, *_ = dsx.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=take_torch_schedule(config),
        config=config,
    )
    batches = divide(train, world, engine, arguments)
    engine.dsx.track(data=batches)
    reports = world.rank == 0 and (world.cluster_id == 0 or not world.has_one_launcher)
    console = Console(highlight=False, soft_wrap=True) if reports else None
    if console and arguments.scaled:
        console.print(str(arguments.scaled))
    if arguments.resume:
        engine.load_checkpoint(str(arguments.run_dir / "checkpoints"))
        if engine.dsx.step >= arguments.steps:
            raise ValueError(
                f"the checkpoint stands at step {engine.dsx.step}: --steps {arguments.steps} "
                "leaves nothing to do; give a larger number"
            )
    arguments.run_dir = engine.dsx.run_dir  # another one where that of the config is used
    checkpoints = arguments.run_dir / "checkpoints"
    if world.rank == 0 and not arguments.resume:
        (arguments.run_dir / "summary.json").unlink(missing_ok=True)
        set_aside(checkpoints / f"cluster_{world.cluster_id}")
    return Run(
        arguments, dataset, validation, world, engine, shape, num_parameters, batches,
        str(checkpoints), console,
    )  # fmt: skip


def divide(
    data: TokenWindows, world: dsx.World, engine: Any, arguments: argparse.Namespace
) -> ClusterBatches:
    """Return this rank's batches of data that all clusters share, or of the cluster's own."""
    is_own = arguments.shards == "own"
    batches = ClusterBatches(
        data,
        engine.train_micro_batch_size_per_gpu(),
        cluster_id=0 if is_own else world.cluster_id,
        num_clusters=1 if is_own else world.num_clusters,
        rank=dist.get_rank(engine.data_parallel_group),
        world_size=engine.dp_world_size,
        seed=arguments.seed,
        shards="iid" if is_own else arguments.shards,
    )
    if not is_own:
        require_same(batches, engine.dsx.gather)
    return batches


def train(run: Run) -> Counters:
    """Train up to --steps, save, and drain the transfers in flight; return the cluster's sums."""
    arguments, handle = run.arguments, run.engine.dsx
    meter = Meter(run.engine.dsx, run.num_data_ranks, run.engine.device)
    total = window = Counters()
    is_last, until = False, time.monotonic() + 60 * (arguments.max_minutes or math.inf)
    with open_bar(run.console) as bar:
        task = bar.add_task("", total=arguments.steps)
        while not is_last:
            step = meter.count(1, *train_step(run))
            total, window = total + step, window + step
            more = {"bytes_sent": total.bytes_sent, "total_steps": arguments.steps}
            handle.log_step(**step.record(), **more)
            bar.update(task, completed=handle.step)
            if time.monotonic() > until:
                handle.request_stop(f"--max-minutes {arguments.max_minutes:g}")
            is_last = handle.should_stop() or handle.step == arguments.steps
            if is_last or handle.step % arguments.log_interval == 0:
                text = f"{window}  sent {format_bytes(total.bytes_sent)}"
                bar.update(task, description=text)
                if run.console and not run.console.is_terminal:
                    run.console.print(f"step {handle.step:>4}/{arguments.steps}  {text}")
                window = Counters()
            if is_last:
                handle.finish()  # what is saved now is the finished model
            if is_last or handle.step % (arguments.save_interval or arguments.steps) == 0:
                run.engine.save_checkpoint(run.checkpoints, tag=f"step_{handle.step:06d}")
    return total + meter.count()


def train_step(run: Run) -> tuple[float, int]:
    """Take one inner step; return this rank's mean loss and number of tokens."""
    engine = run.engine
    batches = [next(run.batches) for _ in range(engine.gradient_accumulation_steps())]
    tokens = sum(windows[:, 1:].numel() for windows in batches)
    if run.is_pipeline:
        return engine.train_batch(with_targets(batches)).item(), tokens
    loss_sum = 0.0
    for windows in batches:
        windows = windows.to(engine.device)
        loss = engine(windows[:, :-1], windows[:, 1:])
        engine.backward(loss)
        engine.step()
        loss_sum += loss.item()
    return loss_sum / len(batches), tokens


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the mean loss on evenly spread held-out windows, shared out to the ranks."""
    engine, validation = run.engine, run.validation
    batch_size = engine.train_micro_batch_size_per_gpu()
    round_size = batch_size * run.num_data_ranks
    count = min(run.arguments.validation_batches * round_size, len(validation))
    if run.is_pipeline:
        count -= count % round_size  # it takes whole micro-batches, as many on every rank
    chosen = [i * len(validation) // count for i in range(count)]
    own = chosen[run.data_rank :: run.num_data_ranks]
    starts = range(0, len(own), batch_size)
    batches = [torch.stack([validation[i] for i in own[s : s + batch_size]]) for s in starts]
    if run.is_pipeline:
        return engine.eval_batch(with_targets(batches), num_micro_batches=len(batches)).item()
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    engine.eval()
    for windows in batches:
        windows = windows.to(engine.device)
        loss_sum += engine(windows[:, :-1], windows[:, 1:]).double() * len(windows)
    engine.train()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / count


def conclude(run: Run, total: Counters, started: float) -> None:
    """Validate every cluster and their average, export the average, write and show the results."""
    handle, run_dir = run.engine.dsx, run.arguments.run_dir
    mine = (evaluate(run), total.tokens_per_second, total.utilization, total.bytes_sent)
    val_losses, speeds, utilizations, sent = zip(*handle.gather(mine), strict=True)
    with handle.averaged():
        average = evaluate(run)
        if run.world.cluster_id == 0:
            export_model(run)
    if run.console is None:
        return
    results = Results(
        val_losses, average, speeds, utilizations, sent, run.dataset.unigram_entropy, started
    )
    weight = next(run.engine.module.parameters())
    conclude_run(handle, run.console, run_dir, results, run.num_parameters * weight.element_size())


def export_model(run: Run) -> None:
    """Write the weights and the shape that `GPTConfig(**shape)` takes; all ranks of a cluster call.

    ZeRO-3 has taken the parameters apart: they are gathered one by one.
    """
    weights: dict[str, torch.Tensor] = {}
    is_writer, run_dir = run.world.rank == 0, run.arguments.run_dir
    if run.is_pipeline:
        weights = gather_weights(run.engine)
    else:
        for name, weight in run.engine.module.state_dict(keep_vars=True).items():
            with deepspeed.zero.GatheredParameters([weight]):
                if is_writer:
                    weights[name] = weight.detach().to("cpu", copy=True)
    if is_writer:
        save_file(weights, run_dir / "model.safetensors")
        (run_dir / "model.json").write_text(json.dumps(asdict(run.shape), indent=2) + "\n")


def prepare_process() -> None:
    """Keep DeepSpeed's log to one rank's warnings; give each rank its share of the cores."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dsx").setLevel(logging.INFO)
    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.ERROR
    expected = ("Setting accelerator to CPU", "Attempting to get learning rate")
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: record.levelno >= level and not record.getMessage().startswith(expected)
    )
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*all_gather_into_tensor")
    if "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_SIZE", 1))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))


def main() -> int:
    """Train; return the exit status."""
    started = time.perf_counter()
    prepare_process()
    try:
        arguments = parse_arguments()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        run = set_up(arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if arguments.local_rank > 0:
            time.sleep(5)  # the launcher ends all ranks when one exits: let the first one speak
        print(f"error: {error}", file=sys.stderr)
        return 2
    except dsx.PeerLost as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        conclude(run, train(run), started)
    except dsx.PeerLost as error:
        print(f"error: {error}", file=sys.stderr)
        os._exit(1)  # what is in flight to a lost cluster is not worth waiting for
    run.engine.dsx.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
