"""What two clusters come to at a sync is the mean of what each trains by itself, bit for bit.

In bf16, too, where a router's near ties fall differently in any other program.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_by_parts
from tests.engines.engines import NUM_CLUSTERS
from tests.engines.megatrons import (
    Kind,
    build_engine,
    build_inner,
    gather_overlapped,
    join,
    needs_megatron,
    train_step,
    whole_weights,
)
from tests.engines.test_megatron_alone import ALONE
from tests.tiny import H

pytestmark = needs_megatron

AVERAGED = {name: value for name, value in ALONE.items() if name != "clusters"}
KINDS = [
    Kind(experts=4, expert_parallel=2, precision="bf16", is_sharded=True, overlaps=True),
    Kind(experts=4, expert_parallel=2, precision="bf16"),
    Kind(tensor=2, experts=4, expert_parallel=2, expert_tensor=1, precision="bf16"),
    Kind(context=2, experts=4, expert_parallel=2, precision="bf16", is_sharded=True),
    Kind(pipeline=2, experts=4, precision="bf16", optimizer="muon"),
    Kind(context=2, precision="bf16", is_sharded=True, overlaps=True),
]
OF_FOUR = [
    Kind(tensor=2, experts=4, expert_parallel=2, precision="bf16", is_sharded=True),
    Kind(pipeline=2, experts=4, expert_parallel=2, precision="bf16"),
]


def train_kinds(kinds: list[Kind]) -> list[dict[str, Any]]:
    return [train_apart_and_together(kind) for kind in kinds]


def train_apart_and_together(kind: Kind) -> dict[str, Any]:
    """Return this rank's masters after H steps: of its cluster by itself, and synchronised."""
    from dsx.engines.megatron.masters import locate

    def masters_after_training(engine: Any) -> list[Any]:
        for step in range(1, H + 1):
            train_step(engine, step, cluster=join().cluster_id)
        gather_overlapped(engine)
        places = locate(engine.optimizer)
        return [piece.view().numpy().copy() for place in places for _, piece in place.pieces()]

    alone = masters_after_training(build_inner(kind, seed=0))
    engine = build_engine(kind, seed=0, **AVERAGED)
    together = masters_after_training(engine)
    whole_weights(engine)  # are alike wherever they are held twice
    engine.handle.close()
    return {"alone": alone, "together": together}


def check(kinds: list[Kind], num_ranks: int) -> None:
    ranks = run_by_parts(train_kinds, num_ranks, of=kinds, timeout_seconds=280, engine="megatron")
    per_cluster = num_ranks // NUM_CLUSTERS
    for index, kind in enumerate(kinds):
        for rank in range(per_cluster):
            pair = [ranks[cluster * per_cluster + rank][index] for cluster in range(NUM_CLUSTERS)]
            for number, apart in enumerate(zip(*(one["alone"] for one in pair), strict=True)):
                mean = torch.stack([torch.tensor(own) for own in apart]).mean(0)
                assert not torch.tensor(apart[0]).equal(torch.tensor(apart[1]))
                for one in pair:
                    assert torch.tensor(one["together"][number]).equal(mean), (kind, rank, number)


@pytest.mark.ci
@pytest.mark.parametrize(("kinds", "num_ranks"), [(KINDS, 4), (OF_FOUR, 8)])
def test_two_clusters_come_to_the_mean_of_both(kinds: list[Kind], num_ranks: int) -> None:
    check(kinds, num_ranks)
