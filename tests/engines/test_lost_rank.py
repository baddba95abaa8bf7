"""A rank of a cluster that hangs, or never comes, is named by the others, within a limit."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

import dsx
from dsx.comm.cluster_world import limit_collectives
from dsx.core.transport import PeerLost
from dsx.engines.cluster_collectives import ClusterCollectives
from megatron_patches.timeouts import timeout_of
from tests.distributed import run_distributed


def hang_after(num_clusters: int) -> list[str]:
    """Rank 1 comes to the world, and to nothing else."""
    clusters = {"num_clusters": num_clusters, "join_deadline_seconds": 20, "deadline_seconds": 20}
    world = dsx.init_distributed({"dsx": {"preset": "diloco", "clusters": clusters}})
    ranks, in_cluster = ClusterCollectives(None), world.in_cluster()
    limit_collectives(timedelta(seconds=1))
    in_cluster._group.set_timeout(timedelta(seconds=1))
    told: list[str] = []
    for wait in (
        lambda: ranks.max_over_ranks(torch.ones(1)),
        lambda: in_cluster.gather("the end", 1),
    ):
        if world.rank == 1:
            continue
        try:
            wait()
        except PeerLost as lost:
            told.append(str(lost))
    have_told = world.new_handle_store()
    if world.rank == 0:
        have_told.set("rank 0 has named the other", "")
    have_told.wait(["rank 0 has named the other"], timedelta(seconds=30))
    return told


def test_a_rank_that_hangs_is_named() -> None:
    (collective, gather), nothing = run_distributed(hang_after, 2, 1)
    assert nothing == []
    assert "rank 0 waits for the ranks of this stage (values of every rank), of which" in collective
    assert "the end: rank 0 waits for the other 1 rank(s) of cluster 0, of which one" in gather


def join_alone() -> str:
    if os.environ["RANK"] == "1":
        return "does not start"
    clusters = {"num_clusters": 1, "join_deadline_seconds": 1}
    try:
        dsx.init_distributed({"dsx": {"preset": "diloco", "clusters": clusters}})
    except PeerLost as lost:
        return str(lost)
    return ""


def test_a_rank_that_does_not_come_is_named() -> None:
    told, _ = run_distributed(join_alone, 2)
    assert told.startswith("cluster 0, rank 0 of 2: rank(s) 1 of this cluster did not join within")
    assert "within 1 s (clusters.join_deadline_seconds)" in told


@pytest.mark.parametrize(
    ("arguments", "minutes"),
    [
        (["--lr", "1", "--distributed-timeout-minutes", "3"], 3),
        (["--distributed-timeout-minutes=90"], 90),
        (["--lr", "1", "--dsx-preset", "diloco"], None),
    ],
)
def test_megatrons_own_limit_is_of_its_default_group(arguments: list[str], minutes: int) -> None:
    assert timeout_of(arguments) == (minutes and timedelta(minutes=minutes))
