#!/usr/bin/env python3
"""Print the table of docs/results/dry-run.md: what runs of 70 to 235 B parameters come to.

Each row is a `dsx dry-run` of a file in configs/, whose ranks are built without memory, network or
accelerators. A step is as long as its arithmetic takes at 40 % of an A800's bf16 rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsx.bench.dry_run.dry_run import Asked, DryRun, build
from dsx.core.units import format_bytes

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = (
    "qwen_107b.flags", "qwen_107b_zero3.json", "qwen_107b_pipeline.json", "llama_70b.flags",
    "qwen_235b_a22b.flags",
)  # fmt: skip
OF_JSON = "qwen_107b.flags", 80  # the model's sizes, and the ranks of a cluster
CLUSTERS = (2, 8, 32, 128)
GBPS, LATENCY_MS = 1.0, 20.0
FLOPS = 0.4 * 312e12
FLOPS_PER_TOKEN = 8  # of a parameter it goes through: forward twice, all recomputed, and backward
HEAD = (
    "file, preset", "clusters", "sent by a rank in a round", "a cluster's line, of a round",
    "owners: largest / mean", "connections of a rank", "host memory of a rank", "utilization",
)  # fmt: skip


def step_seconds(run: DryRun) -> float:
    """Return what a step takes for its arithmetic alone."""
    batch = run.files.batch
    assert batch.sequences_per_step is not None, "the files give --global-batch-size"
    tokens = batch.sequences_per_step * batch.sequence
    return FLOPS_PER_TOKEN * run.active_parameters * tokens / (run.files.cluster.ranks * FLOPS)


def row(name: str, clusters: int) -> Sequence[str]:
    """Return a row of the table."""
    model: Path | None = None
    ranks: int | None = None
    if name.endswith(".json"):
        model, ranks = CONFIGS / OF_JSON[0], OF_JSON[1]
    line = Asked(CONFIGS / name, model, clusters, ranks, gbps=GBPS, latency_ms=LATENCY_MS)
    run = build(line)
    seconds = step_seconds(run)
    found = replace(run, asked=replace(line, step_seconds=seconds)).record()
    sent, ranks = found["bytes_per_round_per_rank"], found["ranks"]
    on_line = 8 * found["bytes_per_round_per_cluster"] / (1e9 * GBPS)
    of_round = seconds * run.config.method.schedule.interval
    return (
        f"`{name}`, {run.config.preset}", f"{clusters} of {ranks}", format_bytes(sent),
        f"{on_line:,.0f} s of {of_round:,.0f} s", f"{found['owner_spread']:.2f}",
        str(found["sockets_per_rank"]), format_bytes(found["host_bytes_per_rank"]),
        f"{100 * found['utilization']:.1f} %",
    )  # fmt: skip


def main() -> None:
    """Print the rows of the files and numbers of clusters that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--clusters", nargs="+", type=int, default=CLUSTERS)
    given = parser.parse_args()
    for cells in (HEAD, ["---"] * len(HEAD)):
        print(f"| {' | '.join(cells)} |", flush=True)
    for name in given.files:
        for clusters in given.clusters:
            print(f"| {' | '.join(row(name, clusters))} |", flush=True)


if __name__ == "__main__":
    main()
