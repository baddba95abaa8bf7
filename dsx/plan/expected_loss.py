"""What a way of running is expected to lose against data parallel, by the runs that were made.

`leaderboard.json` holds rows as `dsx bench convergence --json` writes them, of small models on two
cores. There is no law from them to another model: the row of the same preset that is nearest is
shown with its spread, and what it was not tried with is named. Nearest: most rounds first, since
the gap falls with rounds, then the least distance in doublings of H and of the clusters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ExpectedLoss:
    """A row's loss above data parallel, in percent of it, and how far from here it was measured.

    `sd` is the standard deviation over `num_seeds`, None of one; `beyond` names what lies outside
    of all rows of the preset, so that the figure is an extrapolation in it.
    """

    gap_percent: float
    sd: float | None
    num_seeds: int
    row: Row
    beyond: tuple[str, ...]

    def __str__(self) -> str:
        """Return the figure; a star marks what is extrapolated."""
        spread = "" if self.sd is None else f"+-{self.sd:.1f}"
        return f"{self.gap_percent:.1f}{spread}{'*' if self.beyond else ''}"


@lru_cache
def leaderboard() -> tuple[Row, ...]:
    """Return the rows that come with dsx."""
    text = (Path(__file__).parent / "leaderboard.json").read_text()
    return tuple(json.loads(text))


def expected_loss(
    preset: str, interval: int, num_clusters: int, numel: int, rows: Sequence[Row] | None = None
) -> ExpectedLoss | None:
    """Return what the nearest row of a preset has lost; None where there is none."""
    known = leaderboard() if rows is None else rows
    own = [row for row in known if row["preset"] == preset and row["shards"] == "iid"]
    if not own:
        return None

    def distance(row: Row) -> tuple[float, float]:
        rounds = row["steps"] / row["interval"]
        apart = _doublings(row["interval"], interval) + _doublings(row["clusters"], num_clusters)
        return -rounds, apart

    nearest = min(own, key=distance)
    here = {
        "parameters": ("parameters", numel),
        "H": ("interval", interval),
        "clusters": ("clusters", num_clusters),
    }
    beyond = tuple(
        name
        for name, (key, value) in here.items()
        if not min(row[key] for row in own) <= value <= max(row[key] for row in own)
    )
    return ExpectedLoss(
        nearest["gap_percent"], nearest["gap_sd"], len(nearest["seeds"]), nearest, beyond
    )


def explain(found: Sequence[ExpectedLoss]) -> list[str]:
    """Return lines that say what the figures are, how they were measured and what they are not."""
    if not found:
        return []
    studies: dict[str, list[str]] = {}
    for f in found:
        row = f.row
        study = (
            f"{row['steps'] // row['interval']} rounds of {row['interval']} steps, "
            f"{row['clusters']} clusters, {row['parameters']:.2g} parameters, inner {row['inner']}"
        )
        studies.setdefault(study, []).append(row["preset"])
    beyond = dict.fromkeys(name for f in found for name in f.beyond)
    lines = ["loss: validation loss above data parallel's of the same tokens, measured in"]
    lines += [f"  {study}: {', '.join(dict.fromkeys(own))}" for study, own in studies.items()]
    if beyond:
        lines.append(f"  *: extrapolated from there in {', '.join(beyond)} (docs/recipes.md)")
    return lines


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))
