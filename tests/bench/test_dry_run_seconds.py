"""Seconds that `dsx dry-run` tells, against small runs of DeepSpeed: within a factor of two.

A start is held by processor time, which other work on the host does not add to; a save to plain
writes of as many bytes, by turns, on all ranks at once; the utilization to a line of known rate.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dsx
from dsx.bench.dry_run.asked import Asked
from dsx.bench.dry_run.dry_run import build
from dsx.bench.start.job import MODEL, WORLD
from dsx.bench.start.laps import Laps
from dsx.comm import world as worlds
from dsx.core.types import Stage
from dsx.plan.gpt_shapes import GPT
from tests.bench.test_dry_run_deepspeed import Layer, TransformerLayer, named, whole
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, quiet
from tests.installed import needs
from tests.over_links import run_over_links

RANKS, PAIRS = 2, 5
MBIT, INTERVAL, ROUNDS = 8.0, 2, 3
SIZES: dict[str, Any] = {
    "heads": 4, "groups": 4, "is_rms_norm": True, "has_bias": False, "is_tied": False,
}  # fmt: skip
LARGE = GPT(layers=4, hidden=256, ffn=1024, vocabulary=4096, **SIZES)
SMALL = GPT(layers=2, hidden=64, ffn=256, vocabulary=1024, **SIZES)
KINDS = ["ZeRO-1", "ZeRO-3", "pipeline"]


def flags_of(model: GPT) -> str:
    return (
        f"--num-layers {model.layers} --hidden-size {model.hidden} --num-attention-heads 4 "
        f"--vocab-size {model.vocabulary} --seq-length 32 --position-embedding-type rope "
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
    )


def document(kind: str) -> dict[str, Any]:
    config = ds_config(3 if kind == "ZeRO-3" else 1, "bf16", "diloco")
    config["dsx"] = {
        "preset": "diloco",
        "clusters": {"num_clusters": 2, "deadline_seconds": 60},
        "schedule": {"interval": INTERVAL},
    }
    if kind == "pipeline":
        config["pipeline"] = {"stages": 2, "partition": "uniform"}
    return config


def module(kind: str) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    shapes = LARGE.stage(Stage())
    if kind != "pipeline":
        return whole(shapes)
    parts = [f"decoder.layers.{number}." for number in range(LARGE.layers)]
    parts = ["embedding", *parts, "decoder.final", "output_layer"]
    kinds = [TransformerLayer if "layers" in part else Layer for part in parts]
    return PipelineModule(
        [LayerSpec(one, named(shapes, part)) for one, part in zip(kinds, parts, strict=True)],
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda x, y: F.mse_loss(x.float(), y.float()),
    )


def run(kind: str, folder: str) -> dict[str, Any]:
    """Start, train to the second round, save some times beside plain writes."""
    from dsx.engines import attach
    from dsx.engines.deepspeed import engine as engines

    quiet()
    config, own = document(kind), Path(folder) / os.environ["RANK"]
    own.mkdir()
    laps = Laps(0, 0)
    laps.around(worlds, "init_cluster_world", "meet", WORLD)
    laps.around(engines, "adopt_world", "meet", WORLD)
    dsx.init_distributed(config)
    laps.lap("meet")
    model = module(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    laps.around(attach, "_attach_deepspeed", MODEL, "attach")
    engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    for _ in range(3):
        for _ in range(config["gradient_accumulation_steps"]):
            if kind != "pipeline":
                engine.backward(engine(x).mean())
                engine.step()
        if kind == "pipeline":
            engine.train_batch(iter([(x, x)] * config["gradient_accumulation_steps"]))
    pairs = [save_and_write(engine.dsx, own, number) for number in range(PAIRS)]
    ours = [lap for lap in laps.laps if lap.phase not in (WORLD, MODEL)]
    started = sum(lap.cpu_seconds + lap.serving_seconds for lap in ours)
    found = {"started": started, "pairs": pairs}
    engine.dsx.close()
    engine.destroy()
    return found


def save_and_write(handle: Any, folder: Path, number: int) -> tuple[float, float, int]:
    """Return the seconds of a save, those of a plain write of its bytes, and the bytes."""
    saved = folder / str(number)
    saved.mkdir()
    dist.barrier()
    since = time.perf_counter()
    handle.write(saved)
    seconds = time.perf_counter() - since
    (file,) = saved.glob("*.safetensors")
    content = file.read_bytes()
    dist.barrier()
    since = time.perf_counter()
    with (folder / f"plain {number}").open("wb") as plain:
        plain.write(content)
        plain.flush()
        os.fsync(plain.fileno())
    hashlib.sha256(content)
    return seconds, time.perf_counter() - since, len(content)


def dry(folder: str) -> list[dict[str, Any]]:
    """What is told of these runs; seconds of a save at 1 MB/s."""
    flags, found = Path(folder) / "model.flags", []
    flags.write_text(flags_of(LARGE))
    for kind in KINDS:
        source = Path(folder) / "run.json"
        source.write_text(json.dumps(document(kind)))
        made = build(Asked(source, flags, ranks=RANKS, latency_ms=0))
        at_1_mb = replace(made, asked=replace(made.asked, disk_mb_s=1.0))
        record = at_1_mb.record()
        found.append({**record, "fixed": made.start_model.fixed_seconds})
    return found


@needs("deepspeed")
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_starts_and_saves_take_what_was_told(tmp_path: Path) -> None:
    (told,) = run_distributed(dry, 1, str(tmp_path), timeout_seconds=200)
    for kind, said in zip(KINDS, told, strict=True):
        folder = tmp_path / kind
        folder.mkdir()
        runs = run_distributed(run, 2 * RANKS, kind, str(folder), timeout_seconds=200)
        started = said["fixed"] + runs[0]["started"]  # of cluster 0's first; waits are the model's
        assert started / 2 < said["start_seconds"] < 2 * started, (kind, started)
        pairs = [pair for found in runs for pair in found["pairs"]]
        largest = max(size for _, _, size in pairs)
        assert said["save_bytes_per_rank"] == pytest.approx(largest, rel=0.01)  # with its header
        saved = largest * median(seconds / size for seconds, _, size in pairs)
        rate = median(size / plain for _, plain, size in pairs)
        at_rate = 1e6 * said["save_seconds"] / rate
        assert saved / 2 < at_rate < 2 * saved, (kind, saved, at_rate, pairs)


def run_on_a_line() -> dict[str, float]:
    """Train some rounds at a rate; return seconds of a step, and those that a round waits."""
    quiet()
    config = document("ZeRO-1")
    engine = dsx.initialize(
        model=whole(SMALL.stage(Stage())), config=config,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )[0]  # fmt: skip
    world = worlds.current_world()
    assert world is not None
    world.limit_rate(MBIT)
    x = torch.ones(3, 4, dtype=torch.bfloat16)

    def train(steps: int) -> tuple[float, float]:
        since, before = time.perf_counter(), engine.dsx.totals.blocked_seconds
        for _ in range(steps * config["gradient_accumulation_steps"]):
            engine.backward(engine(x).mean())
            engine.step()
        return time.perf_counter() - since, engine.dsx.totals.blocked_seconds - before

    train(INTERVAL)
    seconds, blocked = train(ROUNDS * INTERVAL)
    engine.dsx.close()
    return {"step": (seconds - blocked) / (ROUNDS * INTERVAL), "exposed": blocked / ROUNDS}


def dry_on_a_line(folder: str, step_seconds: float) -> float:
    flags, source = Path(folder) / "small.flags", Path(folder) / "small.json"
    flags.write_text(flags_of(SMALL))
    source.write_text(json.dumps(document("ZeRO-1")))
    asked = Asked(
        source, flags, ranks=RANKS, step_seconds=step_seconds, gbps=MBIT / 1e3, latency_ms=0
    )
    return build(asked).utilization


@needs("deepspeed", "zmq", "cryptography")
@pytest.mark.ci
def test_the_utilization_of_a_line_is_what_was_told(tmp_path: Path) -> None:
    runs = run_over_links(run_on_a_line, 2, RANKS, timeout_seconds=120)
    step, exposed = (median(found[name] for found in runs) for name in ("step", "exposed"))
    (told,) = run_distributed(dry_on_a_line, 1, str(tmp_path), step, timeout_seconds=120)
    real = INTERVAL * step / (INTERVAL * step + exposed)
    assert real / 2 < told < 2 * real < 1.5, (told, runs)
    waited = INTERVAL * step * (1 / told - 1)
    assert exposed / 2 < waited < 2 * exposed, (waited, runs)
