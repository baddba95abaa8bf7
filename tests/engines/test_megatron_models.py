"""BERT, T5, hybrids and further tokens in two clusters: the mean of what each trains alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_by_parts
from tests.engines.engines import NUM_CLUSTERS
from tests.engines.megatrons import (
    Kind,
    build_engine,
    build_inner,
    join,
    needs_megatron,
    train_step,
    whole_weights,
)
from tests.engines.test_megatron_checkpoint import having_children, resume_kind
from tests.tiny import H

pytestmark = needs_megatron

BY_MEANS = {"preset": "local_sgd", "schedule": {"interval": H}, "fragments": {}, "delay": {}}
KINDS = [
    Kind(family="bert", pipeline=2, is_tied=True),
    Kind(family="bert", tensor=2),
    Kind(family="t5", is_tied=True),
    Kind(family="t5", tensor=2, is_sharded=True, precision="bf16"),
    Kind(family="mtp", pipeline=2),
    Kind(family="mtp", pipeline=2, is_sharded=True, precision="bf16"),
    Kind(family="mtp", is_tied=True),
    Kind(family="own"),
    Kind(family="own", tensor=2, is_sharded=True, precision="bf16"),
    Kind(family="hybrid", pipeline=2),
    Kind(family="hybrid", tensor=2, layers_per_stage=4, is_sharded=True, precision="bf16"),
]


def train(kind: Kind, base: Path) -> dict[str, Any]:
    """Train H steps alone, H steps in clusters from the same start; then save and resume."""
    world = join()
    alone = build_inner(kind, 0)
    for step in range(1, H + 1):
        train_step(alone, step, cluster=world.cluster_id)
    apart = {name: weight.numpy() for name, weight in whole_weights(alone).items()}
    together = build_engine(kind, seed=0, **BY_MEANS)
    for step in range(1, H + 1):
        train_step(together, step)
    mean = {name: weight.numpy() for name, weight in whole_weights(together).items()}
    together.handle.close()
    return {
        "cluster": world.cluster_id,
        "apart": apart,
        "mean": mean,
        "resumed": resume_kind(kind, base / str(kind)),
    }


def train_all(base: str, kinds: list[Kind]) -> list[dict[str, Any]]:
    with having_children():
        trained = [train(kind, Path(base)) for kind in kinds]
        dist.barrier()
        return trained


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_clusters_hold_the_mean_and_resume(tmp_path: Path) -> None:
    ranks = run_by_parts(
        train_all, 4, str(tmp_path), of=KINDS, timeout_seconds=200, engine="megatron"
    )
    for index, kind in enumerate(KINDS):
        results = [rank[index] for rank in ranks]
        check_mean(kind, results)
        for result in results:
            assert result["resumed"]["in_flight"] and result["resumed"]["equal"] == [True, True]


def check_mean(kind: Kind, results: list[dict[str, Any]]) -> None:
    by_cluster = [
        next(r for r in results if r["cluster"] == cluster) for cluster in range(NUM_CLUSTERS)
    ]
    first, second = (result["apart"] for result in by_cluster)
    bound = (
        1e-7 if kind.precision == "fp32" else 2**-7
    )  # of a weight: both and the mean are rounded
    assert any((first[name] != second[name]).any() for name in first)
    for name, weight in by_cluster[0]["mean"].items():
        mean = (first[name] + second[name]) / 2
        assert abs(weight - mean).max() <= bound * max(1.0, abs(mean).max()), (kind, name)
        assert (weight == by_cluster[1]["mean"][name]).all()
