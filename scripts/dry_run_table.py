#!/usr/bin/env python3
"""Print the table of docs/results/dry-run.md: what runs of 70 to 235 B parameters come to.

Each row is a `dsx dry-run` of a file in configs/, whose ranks are built without memory, network or
accelerators. The line and the step are as the command assumes them: 1 Gbit/s and 20 ms one way, the
arithmetic at 40 % of an A800's bf16 rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dsx.bench.dry_run.asked import Asked
from dsx.bench.dry_run.dry_run import build
from dsx.core.units import format_bytes

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = (
    "qwen_107b.flags", "qwen_107b_zero3.json", "qwen_107b_pipeline.json", "llama_70b.flags",
    "qwen_235b_a22b.flags",
)  # fmt: skip
CLUSTERS = (2, 8, 32, 128)
HEAD = (
    "file, preset", "clusters", "sent by a rank in a round", "a cluster's line, of a round",
    "owners: largest / mean", "connections of a rank", "host memory of a rank", "utilization",
)  # fmt: skip


def row(name: str, clusters: int) -> Sequence[str]:
    """Return a row of the table."""
    run = build(Asked(CONFIGS / name, clusters=clusters))
    found, rates = run.record(), run.rates
    sent, ranks = found["bytes_per_round_per_rank"], found["ranks"]
    on_line = 8 * found["bytes_per_round_per_cluster"] / (1e9 * rates.gbps)
    of_round = rates.step_seconds * run.config.method.schedule.interval
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
