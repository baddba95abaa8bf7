"""What a row's two runs have left, read and judged: weights, data, steps, exchanges, loss."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.bench.examples.launch import Launched, RowFailed
from dsx.bench.examples.table import Row
from dsx.telemetry.report import summarize


@dataclass(frozen=True)
class Figures:
    """A row's results; `loss` across clusters, `plain_loss` in one world of all ranks.

    `samples` were trained on in each run, `shared` of them by more than one cluster, and `repeated`
    times one was read again within an epoch of its cluster. `sent_bytes` and `syncs` are of one.
    """

    loss: float
    plain_loss: float
    samples: int
    shared: int
    repeated: int
    syncs: int
    sent_bytes: int
    seconds: float
    plain_seconds: float


def read(row: Row, run: Launched, plain: Launched) -> Figures:
    """Return a row's results; RowFailed says what is wrong with them."""
    notes, beside = (_notes(one.out, row.clusters * row.ranks) for one in (run, plain))
    _require_engine(row.wrapper(with_dsx=True), run.out, notes)
    _require_engine(row.wrapper(with_dsx=False), plain.out, beside)
    of_clusters = [notes[m * row.ranks : (m + 1) * row.ranks] for m in range(row.clusters)]
    _require_equal_weights(of_clusters)
    samples, shared = _samples(of_clusters)
    together, _ = _samples([beside])
    if samples != together:
        raise RowFailed(
            f"the clusters have trained on {samples} samples, and data parallel training on "
            f"{together}: {plain.out}"
        )
    if shared:
        raise RowFailed(f"{shared} of {samples} samples were read by more than one cluster")
    repeated = sum(_read_again(row, *one) for one in enumerate(of_clusters))
    syncs, sent = _exchanges(row, run.out / "run")
    return Figures(
        loss=find_loss(row, run.printed, row.clusters),
        plain_loss=find_loss(row, plain.printed, 1),
        samples=samples,
        shared=shared,
        repeated=repeated,
        syncs=syncs,
        sent_bytes=sent,
        seconds=run.seconds,
        plain_seconds=plain.seconds,
    )


def _notes(out: Path, ranks: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rank in range(ranks):
        file = out / "notes" / f"rank_{rank}.json"
        if not file.is_file():
            raise RowFailed(f"rank {rank} has not ended as Python does: it left no {file}")
        found.append(json.loads(file.read_text()))
        if not found[-1]["samples"] or not found[-1]["elements"]:
            raise RowFailed(f"rank {rank} has trained nothing: {file}")
    return found


def _require_engine(wrapper: str, out: Path, ranks: Sequence[dict[str, Any]]) -> None:
    """Raise RowFailed unless what was trained is of the engine that the row names."""
    models = sorted({one["model"] for one in ranks})
    if any(wrapper not in model for model in models):
        raise RowFailed(f"has trained {', '.join(models)} and no {wrapper}: {out}")


def _require_equal_weights(clusters: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Raise RowFailed unless each rank has the same bits as that of its number elsewhere."""
    for rank, of_rank in enumerate(zip(*clusters, strict=True)):
        if len({one["weights"] for one in of_rank}) > 1:
            raise RowFailed(f"the weights of rank {rank} differ between the clusters at the end")


def _samples(clusters: Sequence[Sequence[dict[str, Any]]]) -> tuple[int, int]:
    """Return how many samples were trained on, and how many different ones by several clusters."""
    read = [{one for rank in cluster for one in rank["samples"]} for cluster in clusters]
    shared = {one for number, of in enumerate(read) for one in of if _is_in(one, read[:number])}
    return sum(len(rank["samples"]) for cluster in clusters for rank in cluster), len(shared)


def _read_again(row: Row, cluster: int, ranks: Sequence[dict[str, Any]]) -> int:
    """Return how often a cluster's ranks have read a sample again; RowFailed if too often."""
    counts = Counter(one for rank in ranks for one in rank["samples"])
    repeated = sum(max(0, count - row.epochs) for count in counts.values())
    if repeated > row.drawn_twice * counts.total():
        raise RowFailed(
            f"cluster {cluster} has read {repeated} of {counts.total()} samples again within an "
            f"epoch, on one rank or on several"
        )
    return repeated


def _is_in(sample: str, others: Sequence[set[str]]) -> bool:
    return any(sample in other for other in others)


def _exchanges(row: Row, folder: Path) -> tuple[int, int]:
    report = summarize(folder)
    steps = {cluster.cluster: cluster.steps for cluster in report.clusters}
    if steps != dict.fromkeys(range(row.clusters), row.steps):
        raise RowFailed(f"the clusters have taken {steps} steps, and not {row.steps} each")
    least = min(cluster.syncs for cluster in report.clusters)
    if not least:
        raise RowFailed(f"a cluster has exchanged nothing: {folder}")
    return least, report.bytes_sent


def find_loss(row: Row, printed: str, clusters: int) -> float:
    """Return the loss that the clusters of a run have printed last; RowFailed if there is none.

    Where each has one of its own, that is their mean; else they have to be equal.
    """
    found = [float(value) for value in re.findall(row.loss, printed)]
    if not found or not all(map(math.isfinite, found)):
        raise RowFailed(f"no finite loss is printed: {row.loss} has found {found}")
    if "mean" in row.loss_of:
        return sum(found) / len(found)
    clusters = 1 if "cluster 0" in row.loss_of else clusters
    last = found[-clusters:]
    if len(last) < clusters or len({*last}) > 1:
        raise RowFailed(f"the clusters have printed different losses of one model: {last}")
    return last[0]
