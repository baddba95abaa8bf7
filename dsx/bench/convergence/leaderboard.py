"""One row per preset over its seeds: what it loses against data parallel, and what it saves.

    val_loss       mean over the seeds
    gap_percent    mean of val_loss above data parallel's of the same seed, in percent; gap_sd: the
                   standard deviation over the seeds, null of one seed or where a run diverged
    tokens_ratio   data parallel's tokens to the same loss over the method's; null where the
                   shortest data-parallel run is better already, where a run diverged, or where
                   data parallel has not gained by going on
    bytes_ratio    what a ring of bf16 gradients takes a cluster to send per step over what the
                   method does: both legs, scales, headers, and the average at the end
    hidden_percent of those bytes that travel while training goes on
    tail_percent   mean of the loss of the mean of a run's last models above val_loss, in percent

Data parallel's tokens to a loss are read between whole runs of a quarter, a half and all of the
steps, each with its rate decayed, by a straight line over log steps. A loss along one run would
say less: until the rate has fallen it is higher than a run that ended there would have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dsx.bench.convergence.task import BASELINE, OUTER_BASELINE, Study

LENGTHS = (4, 2)  # data parallel is also trained for a 4th and a 2nd of the steps
MOST_TOKENS = 2.0  # as far as the last line between runs is followed
Lengths = Mapping[int, Sequence[tuple[int, float]]]  # of a seed: steps and losses, by steps


def summarize(
    rows: Sequence[Mapping[str, Any]], study: Study, tries: Mapping[str, int], lengths: Lengths
) -> list[dict[str, Any]]:
    """Return a row per preset of single runs' results, the best first.

    `tries` are how many settings each was chosen from, `lengths` of data parallel.
    """
    names = list(dict.fromkeys(row["preset"] for row in rows))
    table = [
        _row([row for row in rows if row["preset"] == name], study, tries.get(name, 1), lengths)
        for name in names
    ]
    return sorted(table, key=lambda row: (not math.isfinite(row["val_loss"]), row["val_loss"]))


def _row(
    own: Sequence[Mapping[str, Any]], study: Study, tries: int, lengths: Lengths
) -> dict[str, Any]:
    first = own[0]
    gaps = [run["gap_percent"] for run in own]
    is_baseline = first["preset"] == BASELINE
    tokens = [
        1.0 if is_baseline else tokens_ratio(run["val_loss"], lengths[run["seed"]]) for run in own
    ]
    known = [ratio for ratio in tokens if ratio is not None]
    return {
        "preset": first["preset"],
        "inner": study.inner,
        "val_loss": mean(run["val_loss"] for run in own),
        "gap_percent": mean(gaps),
        "gap_sd": stdev(gaps) if len(gaps) > 1 and all(map(math.isfinite, gaps)) else None,
        "tokens_ratio": mean(known) if len(known) == len(tokens) else None,
        "bytes_ratio": mean(bytes_ratio(study, run) for run in own),
        "hidden_percent": mean(run["hidden_percent"] for run in own),
        "seeds": [run["seed"] for run in own],
        "lr": first["lr"],
        "momentum": first["momentum"],
        "inner_lr": study.inner_lr,
        "rest_rate": study.rest_rate,
        "own": first["own"],
        "weight_decay": study.weight_decay,
        "tail_percent": mean(100 * (run["tail_loss"] / run["val_loss"] - 1) for run in own),
        "tries": tries,
        "steps": study.num_steps,
        "clusters": study.num_clusters,
        "interval": study.interval,
        "shards": study.shards,
        "parameters": first["parameters"],
        "tokens": study.num_steps * study.num_clusters * study.batch_size * study.sequence_length,
    }


def bytes_ratio(study: Study, run: Mapping[str, Any]) -> float:
    """Return how often a run's bytes go into those of bf16 gradients around a ring, every step."""
    if run["preset"] in (BASELINE, OUTER_BASELINE):
        return 1.0
    ring = 2 * (study.num_clusters - 1) / study.num_clusters * 2 * run["parameters"]
    sent = run["bytes_per_cluster"] + run["average_bytes"]
    return ring * study.num_steps / sent if sent else math.inf


def tokens_ratio(loss: float, lengths: Sequence[tuple[int, float]]) -> float | None:
    """Return the share of the longest data-parallel run that reaches `loss`.

    `lengths` are (steps, loss) of whole runs, two or more, by steps. None: the shortest is better.
    """
    longest = lengths[-1][0]
    if not math.isfinite(loss) or loss > lengths[0][1]:
        return None
    for (steps, worse), (further, better) in zip(lengths, lengths[1:], strict=False):
        if loss >= better or further == longest:
            if worse <= better:
                return None  # data parallel has not gained by going on
            share = (worse - loss) / (worse - better)
            found = math.log(steps) + share * (math.log(further) - math.log(steps))
            return min(MOST_TOKENS, math.exp(found) / longest)
    return None
