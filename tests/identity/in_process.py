"""Every method with two and three clusters in one process: `dsx.SimulatedClusters`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from .evidence import Run, in_order, new_run, sync_record, weights_of
from .models import LAST_STEP, ROWS, Net, Row, adamw, batch

NUM_CLUSTERS = (2, 3)


def record(workspace: str) -> dict[str, Run]:
    """Return a run for every row and number of clusters. `workspace` is not needed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of settings that few rounds do not suit
    return {
        f"{name}, {num_clusters} clusters": train(row, num_clusters)
        for name, row in ROWS.items()
        for num_clusters in NUM_CLUSTERS
    }


def train(row: Row, num_clusters: int) -> Run:
    import dsx

    run, syncs = new_run(), []

    def on_sync(cluster: int, event: Any) -> None:
        syncs.append({"cluster": cluster, **sync_record(event)})

    models = [copy.deepcopy(Net()) for _ in range(num_clusters)]
    method = dsx.preset(row.preset, num_clusters, **row.overrides)
    clusters = dsx.SimulatedClusters(models, [adamw(m) for m in models], method, on_sync=on_sync)
    losses: list[list[float]] = []
    for _ in range(LAST_STEP):
        losses.append(clusters.train_step(lambda model, m, step: model(*batch(m, step))))
    for when in ("end", "drained"):
        for cluster, model in enumerate(models):
            run["weights"][f"{when}, cluster {cluster}"] = weights_of(model)
        if when == "end":
            clusters.finish()
    with clusters.averaged() as model:
        run["weights"]["averaged"] = weights_of(model)
    run["records"] = {"syncs": in_order(syncs), "losses": losses}
    run["values"] = {"bytes_sent": clusters.bytes_sent, "num_syncs": clusters.num_syncs}
    return run
