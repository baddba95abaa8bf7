"""The table of docs/recipes.md: the H that `recommended` needs, by model, line and clusters.

    python scripts/recipes.py

Every cell is an answer of `dsx plan`: the least H at which 95 % of the time goes into computing.
"""

from __future__ import annotations

from dsx.plan.candidates import Question, Search
from dsx.plan.link import Link
from dsx.plan.model import from_sizes
from dsx.plan.ranking import best_of_each, ranked

PRESET = "recommended"
PEAK, MFU = 312e12, 0.4  # an A100 or A800, as `dsx plan --gpu a800`
# parameters, layers, width, accelerators of a cluster, tokens of a cluster's step
MODELS = {
    "1B": (1.0e9, 16, 2048, 8, 2**19),
    "7B": (6.7e9, 32, 4096, 32, 2**20),
    "70B": (69e9, 80, 8192, 128, 2**21),
    "107B": (107e9, 80, 8192, 160, 2**21),
}
GBPS = (0.1, 1.0, 10.0)
CLUSTERS = (2, 8, 32)


def cell(name: str, gbps: float, num_clusters: int) -> str:
    """Return H, or what is reached where no H up to 1000 is enough."""
    numel, layers, hidden, ranks, tokens = MODELS[name]
    model = from_sizes(numel, layers, hidden, ranks)
    seconds = 6 * numel * tokens / (ranks * PEAK * MFU)
    link = Link(gbps * 1e9, latency_seconds=0.02)
    question = Question(model, seconds, link, num_clusters)
    rows = best_of_each(ranked(Search(question).candidates(), question))
    found = next(row for row in rows if row.preset == PRESET)
    reached = found.prediction.utilization
    late = f", tau {found.overlap_steps}"
    if reached < question.target:
        return f"{100 * reached:.0f} % at {found.interval}"
    return f"{found.interval}{late}"


def main() -> None:
    """Print the table."""
    columns = [(gbps, count) for gbps in GBPS for count in CLUSTERS]
    print("| model | s per step | " + " | ".join(f"{g:g} Gbit/s, C {c}" for g, c in columns) + " |")
    print("| --- " * (2 + len(columns)) + "|")
    for name, (numel, _, _, ranks, tokens) in MODELS.items():
        seconds = 6 * numel * tokens / (ranks * PEAK * MFU)
        cells = [cell(name, *column) for column in columns]
        print(f"| {name} | {seconds:.1f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
