"""Megatron-core inside two clusters, against the same training in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.engines import NUM_CLUSTERS
from tests.backends.megatrons import (
    Kind,
    build_engine,
    needs_megatron,
    reference,
    train_step,
    whole_weights,
)
from tests.distributed import run_distributed

pytestmark = needs_megatron

NUM_STEPS = 14  # more than three outer rounds of H = 4
TWO_RANKS = [Kind(pipeline=2)]


def train_kinds(kinds: list[Kind]) -> list[dict[str, Any]]:
    return [train(kind) for kind in kinds]


def train(kind: Kind) -> dict[str, Any]:
    engine = build_engine(kind)
    start = whole_weights(engine)
    losses = [train_step(engine, step)[0] for step in range(1, NUM_STEPS + 1)]
    result = {
        "cluster": engine.handle.cluster_id,
        "start": as_arrays(start),
        "end": as_arrays(whole_weights(engine)),
        "losses": losses,
        "rounds": engine.handle.loop.history.rounds,
    }
    engine.handle.finish()
    return result


def as_arrays(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: weight.numpy() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def two_ranks() -> list[list[dict[str, Any]]]:
    return run_distributed(train_kinds, 4, TWO_RANKS, timeout_seconds=240)


def check(kind: Kind, results: list[dict[str, Any]]) -> None:
    per_cluster = len(results) // NUM_CLUSTERS
    start = {name: torch.tensor(weight) for name, weight in results[0]["start"].items()}
    data_ranks = per_cluster // (kind.tensor * kind.pipeline)
    expected = reference(kind, start, NUM_STEPS, data_ranks)
    for result in results:
        assert min(result["rounds"]) >= 3
        assert all((result["start"][n] == w.numpy()).all() for n, w in start.items())  # cluster 0's
        ours = expected[result["cluster"]]
        worst = {n: abs(result["end"][n] - w.numpy()).max() for n, w in ours.items()}
        assert max(worst.values()) < 1e-5, worst
        losses = result["losses"]
        assert losses[0] is None or losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", TWO_RANKS, ids=str)
def test_two_ranks_equal_the_reference(kind: Kind, two_ranks: Any) -> None:
    check(kind, [rank[TWO_RANKS.index(kind)] for rank in two_ranks])
