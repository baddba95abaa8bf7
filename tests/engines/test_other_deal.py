"""A checkpoint whose ranks owned other matrices goes on to the bits of a run that went on with it.

So it is where an earlier dsx dealt matrices out otherwise (outer/matrix_owners.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import dsx
from dsx.outer import matrix_owners
from dsx.outer.matrix_owners import Loads, Matrix
from tests.distributed import run_distributed
from tests.engines.torch_ranks import (
    CLUSTERS,
    LAST,
    RANKS,
    STOP,
    Kind,
    Run,
    Trained,
    config_of,
    directory_of,
)

KIND = Kind("fsdp", "low rank")  # a round late: one is under way at the save


def all_to_the_last(matrices: Sequence[Matrix], loads: Loads) -> list[int]:
    return [max(matrix.held) for matrix in matrices]


def train_under_two_deals(base: str) -> tuple[Trained, Trained, int]:
    """Train, save on the way, and go on from that with the matrices dealt out as ever."""
    dsx.init_distributed(config_of(KIND.method))
    with patch.object(matrix_owners, "deal", all_to_the_last):
        whole = Run(KIND)
    directory = directory_of(base, KIND)
    for step in range(1, LAST + 1):
        whole.take_step(step)
        if step == STOP:
            for transfer in whole.handle.loop.in_flight:  # or one cluster may save without a mean
                transfer.pending.wait()
            whole.save(directory)
    dist.barrier()
    trained = whole.finish()
    resumed = Run(KIND, seed=7)
    resumed.load(directory)
    under_way = len(resumed.handle.loop.in_flight)
    for step in range(STOP + 1, LAST + 1):
        resumed.take_step(step)
    return trained, resumed.finish(), under_way


@pytest.mark.ci
def test_a_checkpoint_of_another_deal_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    ranks = run_distributed(
        train_under_two_deals, RANKS * CLUSTERS, str(tmp_path), timeout_seconds=300
    )
    for trained, resumed, under_way in ranks:
        assert under_way and trained.fragments == resumed.fragments
        for name, weights in trained.weights.items():
            assert (weights == resumed.weights[name]).all(), name
            assert (trained.average[name] == resumed.average[name]).all(), name
    for first in range(0, RANKS * CLUSTERS, RANKS):
        own = ranks[first : first + RANKS]
        assert [trained.wire for trained, *_ in own] != [resumed.wire for _, resumed, _ in own]
