"""One cluster that averages with nobody trains as Megatron does without dsx, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsx
from tests.distributed import run_by_parts
from tests.engines.megatrons import (
    Engine,
    Kind,
    build_engine,
    build_inner,
    dsx_config,
    gather_overlapped,
    needs_megatron,
    train_step,
    whole_weights,
)
from tests.tiny import H

pytestmark = needs_megatron

# parameters are averaged in place: with an anchor, local_sgd rounds `anchor - (anchor - local)`
ALONE: dict[str, Any] = {
    "preset": "local_sgd",
    "clusters": {"num_clusters": 1},
    "schedule": {"interval": H},
    "fragments": {},
    "delay": {"type": "average"},
    "outer_optimizer": {"type": "none"},
}
NUM_STEPS = 2 * H + 1
KINDS = [
    Kind(context=2, precision="bf16", is_sharded=True, overlaps=True),
    Kind(experts=4, expert_parallel=2, precision="bf16", is_sharded=True, overlaps=True),
    Kind(context=2),
    Kind(context=2, precision="bf16"),
    Kind(experts=4, expert_parallel=2),
    Kind(experts=4, expert_parallel=2, precision="bf16"),
    Kind(tensor=2, experts=4, expert_parallel=2, expert_tensor=1, is_sharded=True),
    Kind(pipeline=2, experts=4),
]
OF_FOUR = [
    Kind(tensor=2, experts=4, expert_parallel=2),
    Kind(pipeline=2, experts=4, expert_parallel=2, precision="bf16", is_sharded=True),
    Kind(tensor=2, context=2),
]


def train_both(kinds: list[Kind]) -> list[dict[str, Any]]:
    from dsx.bench.megatron_on_cpu import install

    install()
    dsx.init_distributed(dsx_config(**ALONE))
    return [compare(kind) for kind in kinds]


def compare(kind: Kind) -> dict[str, Any]:
    """Train without dsx and with it, from one start and on the same data."""
    plain = build_inner(kind, seed=0)
    begin, losses = whole_weights(plain), train(plain)
    end = state_of(plain)
    ours = build_engine(kind, seed=0, **ALONE)
    ours_losses = train(ours)
    found = state_of(ours)
    syncs = ours.handle.totals.syncs
    ours.handle.close()
    return {
        "losses": ours_losses == losses,
        "moved": any(not end[name].equal(weight) for name, weight in begin.items()),
        "differ": [name for name, value in end.items() if not found[name].equal(value)],
        "same names": found.keys() == end.keys(),
        "syncs": syncs,
    }


def train(engine: Engine) -> list[Any]:
    return [train_step(engine, step, cluster=0) for step in range(NUM_STEPS)]


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """The cluster's weights, and this rank's masters and moments."""
    from dsx.engines.megatron.masters import leaves, locate

    gather_overlapped(engine)
    found = whole_weights(engine)
    pieces = [piece for place in locate(engine.optimizer) for _, piece in place.pieces()]
    for number, piece in enumerate(pieces):
        found[f"master {number}"] = piece.view().clone()
    states = [state for one in leaves(engine.optimizer) for state in one.optimizer.state.values()]
    for number, state in enumerate(states):
        for key in ("exp_avg", "exp_avg_sq"):
            moment = state[key]
            moment = moment.to_local() if hasattr(moment, "to_local") else moment
            found[f"{key} {number}"] = moment.clone()
    assert pieces and states
    return found


@pytest.mark.ci
@pytest.mark.parametrize(("kinds", "num_ranks"), [(KINDS, 2), (OF_FOUR, 4)])
def test_one_cluster_equals_plain_megatron(kinds: list[Kind], num_ranks: int) -> None:
    trained = run_by_parts(train_both, num_ranks, of=kinds, timeout_seconds=280, engine="megatron")
    for rank in trained:
        for kind, found in zip(kinds, rank, strict=True):
            assert found["moved"] and found["syncs"] == 2, kind
            assert found["same names"] and found["losses"] and found["differ"] == [], kind
