"""Outer training adds nothing inside the cluster to what DeepSpeed sends in a step.

In the steps that apply a fragment the ranks agree whether its mean is there on all of them, one
number (deferral.py), and on its parity result, 4 + C numbers per cluster (recovery.py), and without
ZeRO there is one all-gather of the fragment (engines/replicated.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsx.engines.deepspeed.engine import start_engine
from tests.distributed import run_distributed
from tests.engines.engines import (
    NUM_CLUSTERS,
    RANKS_PER_CLUSTER,
    Kind,
    OddNet,
    build_engine,
    engine_arguments,
    quiet,
    train_step,
)
from tests.installed import needs

pytestmark = needs("deepspeed")

NUM_STEPS = 8
SYNCS = (4, 8)  # diloco with H = 4 launches and applies there
KINDS = [
    Kind(0, preset="diloco"),
    Kind(0, "bf16", preset="diloco"),
    Kind(1, groups="two", preset="diloco"),
    Kind(1, "bf16+fp32", preset="diloco"),
    Kind(2, "bf16", groups="two", preset="diloco", zero=("offload",)),
    Kind(3, "bf16", groups="two", preset="diloco", zero=("sub_groups", "some_persistent")),
]
FIGURES = ("autocorrelation", "cluster_cosine", "norm_ratio", "effective_gain")
Traffic = Counter[tuple[str, int]]


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed by name and elements handled."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Traffic = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen[func._opname, sum(t.numel() for t in tensors)] += 1
        return func(*args, **(kwargs or {}))


def traffic_of(engine: Any, cluster: int) -> list[Traffic]:
    """What each step sends inside the cluster."""
    by_step = []
    for step in range(1, NUM_STEPS + 1):
        with Collectives() as collectives:
            train_step(engine, step, cluster=cluster)
        by_step.append(collectives.seen)
    return by_step


def noting(figures: list[dict[str, Any]]) -> Callable[[dict[str, Any]], None]:
    """Return what appends the guard's figures of a sync's record."""

    def note(event: dict[str, Any]) -> None:
        figures.append({name: event[name] for name in FIGURES if name in event})

    return note


def compare_traffic(kinds: list[Kind]) -> list[tuple[list[Traffic], list[Traffic], Any]]:
    quiet()
    results = []
    for kind in kinds:
        engine = build_engine(kind)
        cluster, figures = engine.dsx.cluster_id, list[dict[str, Any]]()
        engine.dsx.loop._on_sync = noting(figures)
        with_dsx = traffic_of(engine, cluster)
        engine.dsx.close()
        engine.destroy()
        alone = start_engine(**engine_arguments(kind))[0]
        results.append((with_dsx, traffic_of(alone, cluster), figures))
        alone.destroy()
    return results


@pytest.fixture(scope="module")
def measured() -> list[list[tuple[list[Traffic], list[Traffic], Any]]]:
    return run_distributed(compare_traffic, 4, KINDS, timeout_seconds=240)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join([*map(str, k[:-1]), *k.zero]))
def test_a_step_sends_what_deepspeed_sends(kind: Kind, measured: Any) -> None:
    numel = sum(p.numel() for p in OddNet().parameters())
    sums = 3 + NUM_CLUSTERS  # of the guard, in the same message
    parity = all_gather_of((7 + NUM_CLUSTERS) * NUM_CLUSTERS + sums)
    together = all_gather_of(-(-numel // RANKS_PER_CLUSTER))
    is_there = all_gather_of(1)
    at_sync = is_there + parity + (together if kind.stage == 0 else Counter())
    for rank in measured:
        with_dsx, alone, _ = rank[KINDS.index(kind)]
        for step in range(2, NUM_STEPS + 1):  # in the first, ZeRO-3 traces the model
            assert sum(alone[step - 1].values()) > 0
            extra = at_sync if step in SYNCS else Counter()
            assert with_dsx[step - 1] == alone[step - 1] + extra


def all_gather_of(numel: int) -> Traffic:
    """One all-gather of so many elements from every rank, its input and its outputs counted."""
    return Counter({("allgather_", numel * (1 + RANKS_PER_CLUSTER)): 1})


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join([*map(str, k[:-1]), *k.zero]))
def test_the_guard_has_the_same_figures_on_every_rank_of_every_cluster(
    kind: Kind, measured: Any
) -> None:
    first, *others = [rank[KINDS.index(kind)][2] for rank in measured]
    assert all(other == first for other in others)
    assert len(first) == len(SYNCS) and {*first[0]} == {*FIGURES[1:3]} and {*first[1]} == {*FIGURES}
