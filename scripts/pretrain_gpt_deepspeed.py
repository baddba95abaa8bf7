"""Pretrain a small GPT: DeepSpeed inside each cluster, dsx between the clusters.

    dsx data build --from stdlib --out data/stdlib
    deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py \
        --deepspeed_config configs/quickstart.json

What dsx adds to a DeepSpeed script: `dsx.init_distributed`, `dsx.initialize`, and the verbs of
`engine.dsx` (track, log_step, finish, averaged, gather). The run directory receives metrics.jsonl
(one more file per further cluster), plot.png, summary.json, checkpoints/, and the average of all
clusters as model.safetensors with model.json.

Terms: utilization = 1 - blocked / elapsed. Blocked is the time that training threads spent inside
dsx (copies, outer steps, waiting for other clusters; of a cluster's ranks the longest counts), and
elapsed the wall time from the first step to the end of the last transfer. Losses are in nats per
token. Bytes are payload handed to the network for other clusters.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
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


@dataclass
class Run:
    """What `set_up` has built."""

    arguments: argparse.Namespace
    dataset: BuildSummary
    validation: TokenWindows
    world: dsx.World
    engine: Any
    batches: ClusterBatches
    console: Console | None  # only a process that reports has one


class Meter:
    """Counts one cluster's progress; every call is one small collective over its ranks."""

    def __init__(self, run: Run) -> None:
        self._handle = run.engine.dsx
        self._shape = (run.world.world_size, 3)
        self._device = run.engine.device
        self._time = time.perf_counter()
        self._blocked = self._handle.totals.blocked_seconds
        self._bytes = 0  # the first step of a resumed run brings what was sent before

    def count(self, steps: int = 0, loss: float = 0.0, tokens: int = 0) -> Counters:
        """Return what happened since the last call: `loss` and `tokens` are this rank's."""
        totals, now = self._handle.totals, time.perf_counter()
        own = [loss, totals.blocked_seconds - self._blocked, totals.bytes_sent - self._bytes]
        ranks = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        ranks[dist.get_rank()] = ranks.new_tensor(own)
        dist.all_reduce(ranks)
        losses, blocked, sent = ranks.T.tolist()
        counted = Counters(
            steps=steps,
            loss_sum=steps * sum(losses) / len(losses),
            tokens=tokens * len(losses),
            seconds=now - self._time,
            blocked_seconds=max(blocked),
            bytes_sent=int(sum(sent)),
        )
        self._time = now
        self._blocked, self._bytes = totals.blocked_seconds, totals.bytes_sent
        return counted


class Display:
    """Progress on the console: a live bar on a terminal, a line per interval in a pipe."""

    def __init__(self, console: Console | None, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=console)
            self._task = self._bar.add_task("", total=num_steps)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, window: Counters, bytes_sent: int) -> None:
        """Show the averages since the last report."""
        text = (
            f"loss {window.loss:.3f}  {window.tokens_per_second:,.0f} tokens/s  "
            f"utilization {window.utilization:.1%}  sent {format_bytes(bytes_sent)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif self._console is not None:
            self._console.print(
                f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  {text}"
            )


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
    add("--layers", type=int, default=4, help="transformer layers")
    add("--hidden", type=int, default=256, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--sequence-length", type=int, default=128, help="tokens per sample")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--save-interval", type=int, default=0, help="steps between checkpoints; 0: at the end")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --run-dir")
    add("--validation-batches", type=int, default=16, help="micro batches per rank")
    add("--log-interval", type=int, default=10, help="steps between progress reports")
    dsx.add_config_arguments(parser)
    arguments = parser.parse_args()
    smallest = {"steps": 1, "save_interval": 0, "validation_batches": 1, "log_interval": 1}
    for name, minimum in smallest.items():
        value, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value < minimum:
            parser.error(f"{option} {value} must be at least {minimum}")
    if not arguments.deepspeed_config:
        parser.error("--deepspeed_config FILE is required; try configs/quickstart.json")
    return arguments


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed JSON with what the command line decides written into it."""
    dsx.load_config(arguments.deepspeed_config)  # its errors name the key and the fix
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    config["dsx"].setdefault("metrics", {})["dir"] = str(arguments.run_dir)
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = arguments.steps
    return config


def build_model(arguments: argparse.Namespace, vocab_size: int) -> GPT:
    shape = GPTConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=arguments.heads,
        sequence_length=arguments.sequence_length,
        vocab_size=vocab_size,
    )
    return GPT(shape, arguments.seed)


def set_up(arguments: argparse.Namespace) -> Run:
    """Check the inputs, join the cluster's world, build the engine, load a checkpoint if asked.

    ValueError and FileNotFoundError say what is wrong with the inputs.
    """
    config = read_config(arguments)
    dataset = read_summary(arguments.data)
    train = TokenWindows(arguments.data / "train", arguments.sequence_length)
    validation = TokenWindows(arguments.data / "validation", arguments.sequence_length)
    model = build_model(arguments, dataset.vocab_size)

    world = dsx.init_distributed(config, args=arguments)
    checkpoints = arguments.run_dir / "checkpoints"
    if world.rank == 0:
        (arguments.run_dir / "summary.json").unlink(missing_ok=True)
        if not arguments.resume:
            set_aside(checkpoints / f"cluster_{world.cluster_id}")
    parameters = model.parameters()
    engine, *_ = dsx.initialize(model=model, model_parameters=parameters, config=config)
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
        engine.load_checkpoint(str(checkpoints))
    rendezvous = arguments.dsx_rendezvous or config["dsx"]["clusters"].get("rendezvous", "env://")
    reports = world.rank == 0 and (world.cluster_id == 0 or rendezvous != "env://")
    console = Console(highlight=False, soft_wrap=True) if reports else None
    return Run(arguments, dataset, validation, world, engine, batches, console)


def set_aside(directory: Path) -> None:
    """Rename the checkpoints of an earlier run, so that --resume cannot mix two runs."""
    if directory.exists():
        kept = directory.with_name(f"{directory.name}.old")
        shutil.rmtree(kept, ignore_errors=True)
        directory.rename(kept)


def train(run: Run) -> Counters:
    """Train up to --steps, save, and drain the transfers in flight; return the cluster's sums."""
    arguments, handle = run.arguments, run.engine.dsx
    meter = Meter(run)
    total = window = Counters()
    with Display(run.console, arguments.steps) as display:
        while handle.step < arguments.steps:
            loss, tokens = train_step(run)
            step = meter.count(1, loss, tokens)
            total, window = total + step, window + step
            handle.log_step(
                loss=step.loss,
                tokens=step.tokens,
                tokens_per_second=step.tokens_per_second,
                blocked_seconds=step.blocked_seconds,
                utilization=step.utilization,
                bytes_sent=total.bytes_sent,
                lr=run.engine.get_lr()[0],
            )
            display.advance(handle.step)
            if handle.step % arguments.log_interval == 0 or handle.step == arguments.steps:
                display.report(handle.step, window, total.bytes_sent)
                window = Counters()
            if arguments.save_interval and handle.step % arguments.save_interval == 0:
                save(run)
    save(run)
    handle.finish()
    total += meter.count()
    handle.log("finish", bytes_sent=total.bytes_sent)
    return total


def train_step(run: Run) -> tuple[float, int]:
    """Take one inner step; return this rank's mean loss and number of tokens."""
    engine = run.engine
    loss_sum, tokens = 0.0, 0
    for _ in range(engine.gradient_accumulation_steps()):
        windows = next(run.batches).to(engine.device)
        loss = engine(windows[:, :-1], windows[:, 1:])
        engine.backward(loss)
        engine.step()
        loss_sum += loss.item()
        tokens += windows[:, 1:].numel()
    return loss_sum / engine.gradient_accumulation_steps(), tokens


def save(run: Run) -> None:
    step = run.engine.dsx.step
    directory = str(run.arguments.run_dir / "checkpoints")
    run.engine.save_checkpoint(directory, tag=f"step_{step:06d}")


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the mean loss on evenly spread held-out windows, shared out to the ranks."""
    engine, validation = run.engine, run.validation
    batch_size = engine.train_micro_batch_size_per_gpu()
    wanted = run.arguments.validation_batches * batch_size * run.world.world_size
    count = min(wanted, len(validation))
    chosen = [i * len(validation) // count for i in range(count)]
    own = chosen[run.world.rank :: run.world.world_size]
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    engine.eval()
    for start in range(0, len(own), batch_size):
        windows = torch.stack([validation[i] for i in own[start : start + batch_size]])
        windows = windows.to(engine.device)
        loss_sum += engine(windows[:, :-1], windows[:, 1:]).double() * len(windows)
    engine.train()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / count


def conclude(run: Run, total: Counters, started: float) -> None:
    """Validate every cluster and their average, export the average, write and show the results."""
    handle, run_dir = run.engine.dsx, run.arguments.run_dir
    mine = {
        "val_loss": evaluate(run),
        "tokens_per_second": total.tokens_per_second,
        "utilization": total.utilization,
        "bytes_sent": total.bytes_sent,
    }
    clusters = handle.gather(mine)
    with handle.averaged():
        average = evaluate(run)
        if run.world.cluster_id == 0 and run.world.rank == 0:
            export_model(run.engine.module, run_dir)
    if run.console is None:
        return
    sizes = [parameter.nbytes for parameter in run.engine.module.parameters()]
    exchanges = 2 * (run.world.num_clusters - 1)  # of all clusters, in a ring all-reduce
    summary = {
        "steps": handle.step,
        "tokens_per_second": sum(c["tokens_per_second"] for c in clusters),
        "utilization": sum(c["utilization"] for c in clusters) / len(clusters),
        "bytes_sent": sum(c["bytes_sent"] for c in clusters),
        "bytes_sent_synchronous": handle.step * exchanges * sum(sizes),
        "val_loss_clusters": [c["val_loss"] for c in clusters],
        "val_loss_average": average,
        "unigram_entropy": run.dataset.unigram_entropy,
        "wall_seconds": time.perf_counter() - started,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report(run_dir)


def export_model(model: GPT, run_dir: Path) -> None:
    """Write the weights and the shape that `GPTConfig(**shape)` takes."""
    weights = {
        name: weight.detach().to("cpu", copy=True) for name, weight in model.state_dict().items()
    }
    save_file(weights, run_dir / "model.safetensors")
    (run_dir / "model.json").write_text(json.dumps(asdict(model.config), indent=2) + "\n")


def prepare_process() -> None:
    """Keep DeepSpeed's log to warnings, one rank's, and give each rank its share of the cores."""
    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= level)
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
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(5)  # the launcher ends all ranks when one exits: let that one speak
        return 2
    total = train(run)
    conclude(run, total, started)
    run.engine.dsx.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
