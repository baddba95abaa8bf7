"""Pretrain a small GPT: DeepSpeed inside each cluster, dsx between the clusters.

    dsx data build --from stdlib --out data/stdlib
    deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py \
        --deepspeed_config configs/quickstart.json

With `--pipeline-stages N` each cluster is a pipeline of N stages (gpt_pipeline.py). What dsx adds
to a DeepSpeed script: `dsx.init_distributed`, `dsx.initialize`, and the verbs of `engine.dsx`. The
run directory receives metrics.jsonl (one more file per further cluster), plot.png, summary.json,
checkpoints/, and the average of the clusters as model.safetensors.

Losses are in nats per token; bytes are payload that one cluster sent to the others. Utilization is
1 - blocked / elapsed: blocked is the time that training threads spent inside dsx (copying, outer
steps, waiting for other clusters; each step counts its slowest rank), elapsed the wall time.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from gpt_pipeline import as_pipeline, gather_weights, with_targets
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file

import dsx
from dsx.data import BuildSummary, ClusterBatches, TokenWindows, read_summary
from dsx.report import format_bytes, report


@dataclass(frozen=True)
class Counters:
    """What one cluster did over some steps."""

    steps: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    bytes_sent: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        """Return the mean training loss."""
        return self.loss_sum / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of the whole cluster."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """Return the share of the time in which dsx did not hold up training."""
        return 1 - self.blocked_seconds / self.seconds if self.seconds else 1.0

    def record(self) -> dict[str, float]:
        """Return what belongs into the record of a step."""
        names = ("loss", "tokens", "tokens_per_second", "blocked_seconds", "utilization")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f} tokens/s  util {self.utilization:.1%}"
        return f"loss {self.loss:.3f}  {speed}"


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


class Meter:
    """Counts one cluster's progress; every call is one small collective over its ranks."""

    def __init__(self, run: Run) -> None:
        self._handle = run.engine.dsx
        self._num_data_ranks = run.num_data_ranks
        self._ranks = torch.zeros(run.world.world_size, 3, device=run.engine.device).double()
        # bytes count from 0: the first step of a resumed run brings what was sent before
        self._last = (time.perf_counter(), self._handle.totals.blocked_seconds, 0)

    def count(self, steps: int = 0, loss: float = 0.0, tokens: int = 0) -> Counters:
        """Return what happened since the last call: `loss` and `tokens` are this rank's."""
        totals = self._handle.totals
        now = (time.perf_counter(), totals.blocked_seconds, totals.bytes_sent)
        seconds, blocked, sent = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        self._ranks.zero_()[dist.get_rank()] = self._ranks.new_tensor([loss, blocked, sent])
        dist.all_reduce(self._ranks)
        losses, blocked, sent = self._ranks.T.tolist()
        return Counters(
            steps=steps,
            loss_sum=steps * sum(losses) / len(losses),
            tokens=tokens * self._num_data_ranks,
            seconds=seconds,
            blocked_seconds=max(blocked),
            bytes_sent=int(sum(sent)),
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a small GPT on byte tokens with DeepSpeed and dsx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--data", type=Path, default=Path("data/stdlib"), help="built by `dsx data build`")
    add("--run-dir", type=Path, help="where results go; none: dsx.metrics.dir of the config")
    add("--steps", type=positive, default=160, help="inner steps, also of the LR schedule")
    add("--pipeline-stages", type=positive, default=1, help="inside a cluster; 1: no pipeline")
    add("--layers", type=positive, default=4, help="transformer layers")
    add("--hidden", type=positive, default=256, help="width of the model")
    add("--heads", type=positive, default=4, help="attention heads")
    add("--sequence-length", type=positive, default=128, help="tokens per sample")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--save-interval", type=positive, help="steps between checkpoints; none: at the end only")
    add("--max-minutes", type=float, metavar="M", help="stop early, save, and end as ever")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --run-dir")
    add("--validation-batches", type=positive, default=16, help="micro batches per rank")
    add("--log-interval", type=positive, default=10, help="steps between progress reports")
    dsx.add_config_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.deepspeed_config:
        parser.error("--deepspeed_config FILE is required; try configs/quickstart.json")
    return arguments


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed JSON with what the command line decides written into it."""
    if "RANK" not in os.environ:
        raise ValueError("start this script with its launcher: deepspeed --num_gpus 4 SCRIPT ...")
    if not (arguments.data / "dataset.json").is_file():
        build = f"dsx data build --from stdlib --out {arguments.data}"
        raise ValueError(f"--data {arguments.data} is not a dataset; build one with: {build}")
    dsx.load_config(arguments.deepspeed_config)  # its errors name the key and the fix
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    metrics = config["dsx"].setdefault("metrics", {})
    arguments.run_dir = arguments.run_dir or Path(metrics.get("dir") or "runs/pretrain_gpt")
    metrics["dir"] = str(arguments.run_dir)
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
    shape = GPTConfig(*size, vocab_size=dataset.vocab_size)
    model: Any = GPT(shape, arguments.seed)
    num_parameters = model.num_parameters()
    world = dsx.init_distributed(config, args=arguments)
    checkpoints = arguments.run_dir / "checkpoints"
    if world.rank == 0 and not arguments.resume:
        (arguments.run_dir / "summary.json").unlink(missing_ok=True)
        set_aside(checkpoints / f"cluster_{world.cluster_id}")
    if arguments.pipeline_stages > 1:
        model = as_pipeline(model, arguments.pipeline_stages)
    engine, *_ = dsx.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = ClusterBatches(
        train,
        engine.train_micro_batch_size_per_gpu(),
        cluster_id=world.cluster_id,
        num_clusters=world.num_clusters,
        rank=dist.get_rank(engine.data_parallel_group),
        world_size=engine.dp_world_size,
        seed=arguments.seed,
    )
    engine.dsx.track(data=batches)
    rendezvous = arguments.dsx_rendezvous or config["dsx"]["clusters"].get("rendezvous", "env://")
    reports = world.rank == 0 and (world.cluster_id == 0 or rendezvous != "env://")
    console = Console(highlight=False, soft_wrap=True) if reports else None
    if arguments.resume:
        engine.load_checkpoint(str(checkpoints))
        if engine.dsx.step >= arguments.steps:
            raise ValueError(
                f"the checkpoint stands at step {engine.dsx.step}: --steps {arguments.steps} "
                "leaves nothing to do; give a larger number"
            )
    return Run(
        arguments, dataset, validation, world, engine, shape, num_parameters, batches,
        str(checkpoints), console,
    )  # fmt: skip


def set_aside(directory: Path) -> None:
    """Rename an earlier run's checkpoints: --resume must not take them for this run's."""
    if directory.exists():
        shutil.rmtree(f"{directory}.old", ignore_errors=True)
        directory.rename(f"{directory}.old")


def train(run: Run) -> Counters:
    """Train up to --steps, save, and drain the transfers in flight; return the cluster's sums."""
    arguments, handle = run.arguments, run.engine.dsx
    meter = Meter(run)
    total = window = Counters()
    is_last, until = False, time.monotonic() + 60 * (arguments.max_minutes or math.inf)
    with open_bar(run.console) as bar:
        task = bar.add_task("", total=arguments.steps)
        while not is_last:
            step = meter.count(1, *train_step(run))
            total, window = total + step, window + step
            handle.log_step(**step.record(), bytes_sent=total.bytes_sent)
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
            if is_last or handle.step % (arguments.save_interval or arguments.steps) == 0:
                run.engine.save_checkpoint(run.checkpoints, tag=f"step_{handle.step:06d}")
    handle.finish()
    return total + meter.count()


def open_bar(console: Console | None) -> Progress:
    """Return a live bar, disabled where the output is not a terminal."""
    columns = (MofNCompleteColumn(), BarColumn(bar_width=8), TimeRemainingColumn())
    text = TextColumn("{task.description}")
    return Progress(*columns, text, console=console, disable=not (console and console.is_terminal))


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
    if run.world.cluster_id:
        losses = f"own {mine[0]:.4f}, average of the clusters {average:.4f}"
        run.console.print(f"validation loss: {losses}; cluster 0 writes summary and figure")
        return
    num_clusters = run.world.num_clusters
    model_bytes = run.num_parameters * next(run.engine.module.parameters()).element_size()
    ring_bytes = 2 * (num_clusters - 1) * model_bytes // num_clusters  # of an all-reduce
    summary = {
        "steps": handle.step,
        "tokens_per_second": sum(speeds),
        "utilization": sum(utilizations) / num_clusters,
        "bytes_sent": max(sent),
        "bytes_sent_synchronous": handle.step * ring_bytes,
        "val_loss_clusters": val_losses,
        "val_loss_average": average,
        "unigram_entropy": run.dataset.unigram_entropy,
        "wall_seconds": time.perf_counter() - started,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report(run_dir)


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
    started = time.perf_counter()
    prepare_process()
    arguments = parse_arguments()
    try:
        run = set_up(arguments)
    except (ValueError, FileNotFoundError) as error:
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
