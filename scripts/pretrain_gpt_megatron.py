"""Pretrain a small GPT: megatron-core inside each cluster, dsx between the clusters.

    dsx data build --from stdlib --out data/stdlib
    torchrun --nproc-per-node 4 scripts/pretrain_gpt_megatron.py \
        --dsx-config configs/quickstart_megatron.json --pipeline-model-parallel-size 2

Flags are Megatron's where it has them; sizes are those of one cluster. What dsx adds to a Megatron
script: `dsx.init_distributed` before anything else, `dsx.attach_megatron` once model and optimizer
are there, `save_outer_state` and `load_outer_state` beside the checkpoint, and the verbs of the
handle. The run directory receives what the quickstart's does, and the model under the names that
megatron-core gives its parameters.

`--scaled-down FILE` takes a file of flags, such as those in configs/paper, and trains its method on
a model that is small enough for a CPU (dsx/examples/scaled_down.py).

Without a GPU, megatron-core runs on the CPU through dsx/bench/megatron_on_cpu.py, for a demo.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import save_file

import dsx
from dsx.config.files import read_json
from dsx.core.units import format_bytes
from dsx.data import BuildSummary, ClusterBatches, TokenWindows, read_summary, require_same
from dsx.examples.arguments import positive
from dsx.examples.scaled_down import scale_down_flags
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
    handle: dsx.Handle
    batches: ClusterBatches
    data_rank: int
    num_data_ranks: int
    console: Console | None  # only a process that reports has one


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a small GPT on byte tokens with megatron-core and dsx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dsx-config", type=Path, help='JSON with the "dsx" block')
    add(
        "--scaled-down", type=Path, metavar="FILE", help="in its place: published flags, made small"
    )
    add("--data-path", type=Path, default=Path("data/stdlib"), help="built by `dsx data build`")
    add("--run-dir", type=Path, help="where results go; none: dsx.metrics.dir of the config")
    add("--tensor-model-parallel-size", type=positive, default=1)
    add("--pipeline-model-parallel-size", type=positive, default=1)
    add("--num-layers-per-virtual-pipeline-stage", type=positive, metavar="N")
    add("--context-parallel-size", type=positive, default=1, help="with an attention of dsx's own")
    add("--num-experts", type=positive, help="in every layer; none: no experts")
    add("--expert-model-parallel-size", type=positive, default=1)
    add("--moe-router-topk", type=positive, default=2)
    add("--moe-ffn-hidden-size", type=positive, help="none: that of --ffn-hidden-size")
    add("--moe-aux-loss-coeff", type=float, default=1e-2)
    add("--num-layers", type=positive, default=4)
    add("--hidden-size", type=positive, default=256)
    add("--ffn-hidden-size", type=positive, help="none: 8/3 of the hidden size, in steps of 32")
    add("--num-attention-heads", type=positive, default=4)
    add("--seq-length", type=positive, default=128)
    add("--make-vocab-size-divisible-by", type=positive, default=128)
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--micro-batch-size", type=positive, default=6)
    add("--global-batch-size", type=positive, default=24, help="of one cluster")
    add("--train-iters", type=positive, default=160)
    add("--lr", type=float, default=1.5e-3)
    add("--min-lr", type=float, default=7.5e-4)
    add("--lr-warmup-iters", type=int, default=40)
    add("--weight-decay", type=float, default=0.1)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.95)
    add("--clip-grad", type=float, default=1.0)
    add("--bf16", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true", help="with the two flags above")
    add("--seed", type=int, default=1234)
    add("--save", type=Path, help="none: checkpoints/ in the run directory")
    add("--load", type=Path, help="go on from what an earlier run has saved there")
    add("--ckpt-step", type=int, help="with --load: which iteration; none: the last one")
    add("--save-interval", type=positive, help="iterations; none: at the end only")
    add("--exit-duration-in-mins", type=float, metavar="M", help="stop early, save, end as ever")
    add("--eval-iters", type=positive, default=16, help="micro-batches per data-parallel rank")
    add("--log-interval", type=positive, default=10)
    dsx.add_launch_arguments(parser)
    arguments = parser.parse_args()
    if bool(arguments.dsx_config) == bool(arguments.scaled_down):
        parser.error("give one of --dsx-config FILE and --scaled-down FILE")
    scaled = None
    if arguments.scaled_down:
        scaled, flags = scale_down_flags(arguments.scaled_down)
        parser.set_defaults(**flags)
        arguments = parser.parse_args()  # what the command line says goes before the file
    arguments.scaled = scaled
    complete(arguments)
    return arguments


def complete(arguments: argparse.Namespace) -> None:
    """Derive what follows from other flags, in place; ValueError says what does not fit."""
    if arguments.ffn_hidden_size is None:
        arguments.ffn_hidden_size = -(-8 * arguments.hidden_size // (3 * 32)) * 32
    per_stage = arguments.num_layers // arguments.pipeline_model_parallel_size
    per_chunk = arguments.num_layers_per_virtual_pipeline_stage or per_stage
    chunks = per_stage // per_chunk if per_chunk else 0
    if per_chunk * chunks * arguments.pipeline_model_parallel_size != arguments.num_layers:
        raise ValueError(
            f"--num-layers {arguments.num_layers} must be a multiple of "
            "--pipeline-model-parallel-size times --num-layers-per-virtual-pipeline-stage"
        )
    arguments.virtual_pipeline_model_parallel_size = chunks
    if arguments.seq_length % (2 * arguments.context_parallel_size):
        raise ValueError(
            f"--seq-length {arguments.seq_length} must be a multiple of twice "
            f"--context-parallel-size, {2 * arguments.context_parallel_size}"
        )
    if (arguments.num_experts or 1) % arguments.expert_model_parallel_size:
        raise ValueError(
            f"--num-experts {arguments.num_experts} must be a multiple of "
            f"--expert-model-parallel-size {arguments.expert_model_parallel_size}"
        )
    if arguments.lr_warmup_iters >= arguments.train_iters:
        raise ValueError(
            f"--lr-warmup-iters {arguments.lr_warmup_iters} must be below --train-iters "
            f"{arguments.train_iters}"
        )
    if arguments.overlap_param_gather and not (
        arguments.overlap_grad_reduce and arguments.use_distributed_optimizer
    ):
        raise ValueError(
            "--overlap-param-gather needs --overlap-grad-reduce and --use-distributed-optimizer"
        )


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON with what the command line decides written into it."""
    if "RANK" not in os.environ:
        raise ValueError("start this script with torchrun --nproc-per-node N SCRIPT ...")
    if not (arguments.data_path / "dataset.json").is_file():
        build = f"dsx data build --from stdlib --out {arguments.data_path}"
        raise ValueError(
            f"--data-path {arguments.data_path} is no dataset; build one with: {build}"
        )
    source = arguments.scaled.document if arguments.scaled else arguments.dsx_config
    dsx.load_config(source)  # its errors name the key and the fix
    config = json.loads(json.dumps(read_json(source)))
    metrics = config["dsx"].setdefault("metrics", {})
    arguments.run_dir = arguments.run_dir or Path(metrics.get("dir") or "runs/pretrain_gpt")
    metrics["dir"] = str(arguments.run_dir)
    return config


def check_sizes(arguments: argparse.Namespace, num_ranks: int) -> None:
    """Raise ValueError unless a cluster's ranks and batches make whole numbers."""
    model = arguments.tensor_model_parallel_size * arguments.pipeline_model_parallel_size
    model *= arguments.context_parallel_size
    if num_ranks % model:
        raise ValueError(
            f"a cluster has {num_ranks} rank(s), which tensor x pipeline x context parallel sizes "
            f"of {model} do not divide; start {model} ranks per cluster, or a multiple"
        )
    per_micro_batch = arguments.micro_batch_size * (num_ranks // model)
    if arguments.global_batch_size % per_micro_batch:
        raise ValueError(
            f"--global-batch-size {arguments.global_batch_size} must be a multiple of "
            f"--micro-batch-size times data-parallel ranks, {per_micro_batch}"
        )


def set_up(arguments: argparse.Namespace) -> Run:
    """Check the inputs, join the cluster's world, build the model, attach dsx, load if asked to."""
    config = read_config(arguments)
    dataset = read_summary(arguments.data_path)
    train = TokenWindows(arguments.data_path / "train", arguments.seq_length)
    validation = TokenWindows(arguments.data_path / "validation", arguments.seq_length)
    world = dsx.init_distributed(config, args=arguments)
    check_sizes(arguments, world.world_size)
    from gpt_megatron import build_engine, padded_vocab_size
    from megatron.core import parallel_state

    engine = build_engine(arguments, padded_vocab_size(arguments, dataset.vocab_size))
    state: Any = parallel_state
    data_rank = state.get_data_parallel_rank()
    num_data_ranks = state.get_data_parallel_world_size()
    batches = ClusterBatches(
        train,
        arguments.micro_batch_size,
        cluster_id=world.cluster_id,
        num_clusters=world.num_clusters,
        rank=data_rank,
        world_size=num_data_ranks,
        seed=arguments.seed,
    )
    facts = {"global_batch_size": arguments.global_batch_size}  # the mean is not weighted
    handle = dsx.attach_megatron(
        engine.chunks,
        engine.optimizer,
        config=config,
        facts=facts,
        vocab_size=dataset.vocab_size,
    )
    require_same(batches, handle.gather)
    handle.track(data=batches)
    if arguments.load:
        load(arguments, engine, handle)
    arguments.run_dir = handle.run_dir  # another one where that of the config is used
    arguments.save = arguments.save or arguments.run_dir / "checkpoints"
    if world.rank == 0 and not arguments.load:
        (arguments.run_dir / "summary.json").unlink(missing_ok=True)
        set_aside(arguments.save / f"cluster_{world.cluster_id}")
        set_aside(arguments.save / "dsx" / f"cluster_{world.cluster_id}")
    reports = world.rank == 0 and (world.cluster_id == 0 or not world.has_one_launcher)
    console = Console(highlight=False, soft_wrap=True) if reports else None
    if console and arguments.scaled:
        console.print(str(arguments.scaled))
    return Run(
        arguments, dataset, validation, world, engine, handle, batches, data_rank, num_data_ranks,
        console,
    )  # fmt: skip


def load(arguments: argparse.Namespace, engine: Any, handle: dsx.Handle) -> None:
    """Load Megatron's checkpoint and the outer state of the same iteration."""
    from megatron_files import load_checkpoint

    from dsx.engines.megatron.checkpoint import load_outer_state

    directory = arguments.load / f"cluster_{handle.cluster_id}"
    wanted = arguments.ckpt_step
    parts = (engine.chunks, engine.optimizer, engine.scheduler)
    iteration = load_checkpoint(directory, *parts, iteration=wanted)
    load_outer_state(handle, iteration, arguments.load)
    if handle.step >= arguments.train_iters:
        raise ValueError(
            f"the checkpoint stands at iteration {handle.step}: --train-iters "
            f"{arguments.train_iters} leaves nothing to do; give a larger number"
        )


def save(run: Run) -> None:
    """Save the outer state, then Megatron's checkpoint, whose tracker so never names a half."""
    from megatron_files import save_checkpoint

    from dsx.engines.megatron.checkpoint import save_outer_state

    engine, iteration, base = run.engine, run.handle.step, run.arguments.save
    directory = base / f"cluster_{run.world.cluster_id}"
    with run.handle.saving():
        save_outer_state(run.handle, iteration, base)
        save_checkpoint(directory, iteration, engine.chunks, engine.optimizer, engine.scheduler)


def train(run: Run) -> Counters:
    """Train up to --train-iters, save, and drain what is in flight; return the cluster's sums."""
    arguments, handle = run.arguments, run.handle
    meter = Meter(handle, run.num_data_ranks, run.engine.device)
    total = window = Counters()
    minutes = arguments.exit_duration_in_mins or math.inf
    is_last, until = False, time.monotonic() + 60 * minutes
    with open_bar(run.console) as bar:
        task = bar.add_task("", total=arguments.train_iters)
        while not is_last:
            batches = [next(run.batches) for _ in range(run.engine.num_micro_batches)]
            loss = run.engine.train_step(batches)
            step = meter.count(1, loss, sum(windows[:, 1:].numel() for windows in batches))
            total, window = total + step, window + step
            handle.log_step(**step.record(), bytes_sent=total.bytes_sent)
            bar.update(task, completed=handle.step)
            if time.monotonic() > until:
                handle.request_stop(f"--exit-duration-in-mins {minutes:g}")
            is_last = handle.should_stop() or handle.step == arguments.train_iters
            if is_last or handle.step % arguments.log_interval == 0:
                text = f"{window}  sent {format_bytes(total.bytes_sent)}"
                bar.update(task, description=text)
                if run.console and not run.console.is_terminal:
                    run.console.print(f"step {handle.step:>4}/{arguments.train_iters}  {text}")
                window = Counters()
            if is_last:
                handle.finish()  # what is saved now is the finished model
            if is_last or handle.step % (arguments.save_interval or arguments.train_iters) == 0:
                save(run)
    return total + meter.count()


def evaluate(run: Run) -> float:
    """Return the mean loss on evenly spread held-out windows, in whole micro-batches per rank."""
    size, validation = run.arguments.micro_batch_size, run.validation
    round_size = size * run.num_data_ranks
    count = min(run.arguments.eval_iters * round_size, len(validation) // round_size * round_size)
    chosen = [i * len(validation) // count for i in range(count)]
    own = chosen[run.data_rank :: run.num_data_ranks]
    starts = range(0, len(own), size)
    batches = [torch.stack([validation[i] for i in own[s : s + size]]) for s in starts]
    loss = torch.tensor(run.engine.evaluate(batches), device=run.engine.device)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def conclude(run: Run, total: Counters, started: float) -> None:
    """Validate every cluster and their average, export the average, write and show the results."""
    handle, run_dir = run.handle, run.arguments.run_dir
    mine = (evaluate(run), total.tokens_per_second, total.utilization, total.bytes_sent)
    val_losses, speeds, utilizations, sent = zip(*handle.gather(mine), strict=True)
    with handle.averaged():
        average = evaluate(run)
        if run.world.cluster_id == 0:
            export_model(run)
    results = Results(
        val_losses, average, speeds, utilizations, sent, run.dataset.unigram_entropy, started
    )
    adapter = handle.loop.adapter
    # of a stage, which its ranks count
    share = sum(adapter.fragment_numel) / adapter.ranks.shard[1]
    num_parameters = torch.tensor(share, dtype=torch.float64, device=run.engine.device)
    dist.all_reduce(num_parameters)
    model_bytes = round(num_parameters.item()) * (2 if run.arguments.bf16 else 4)
    conclude_run(handle, run.console, run_dir, results, model_bytes)


def export_model(run: Run) -> None:
    """Write the weights and the flags that shape the model; all ranks of a cluster call it."""
    from megatron_files import gather_weights

    weights, run_dir = gather_weights(run.engine.chunks), run.arguments.run_dir
    if run.world.rank == 0:
        names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
        shape = {name: getattr(run.arguments, name) for name in names}
        save_file(weights, run_dir / "model.safetensors")
        (run_dir / "model.json").write_text(json.dumps(shape, indent=2) + "\n")


def prepare_process() -> None:
    """Give each rank its share of the cores; map CUDA to the CPU where there is no GPU."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dsx").setLevel(logging.INFO)
    if "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if not torch.cuda.is_available():
        from dsx.bench.megatron_on_cpu import install

        install()
        if os.environ.get("RANK") == "0":
            print("no GPU: megatron-core runs on the CPU through megatron_on_cpu.py, for a demo")


def main() -> int:
    started = time.perf_counter()
    try:
        arguments = parse_arguments()
        prepare_process()
        run = set_up(arguments)
    except (ValueError, FileNotFoundError) as error:
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
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
    run.handle.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
