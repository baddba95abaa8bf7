"""What had not come, for other shards or another number of clusters: these average it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.engines import simulated
from dsx.outer.transfer import Transfer
from tests.checkpoint.half_arrived import HoldingHub, lacking, resume, save_all
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_half_arrived import NUM_STEPS, new_run, stopped, whole_run
from tests.checkpoint.test_reshard import CUTS, shard_loop
from tests.compress.test_over_gloo import loss
from tests.simulated import Simulated


@pytest.fixture(autouse=True)
def _holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "InProcessHub", HoldingHub)


def through_shards(run: Simulated, whole: Path, sharded: Path) -> None:
    """Load every cluster's state on four ranks, and save it from there."""
    for m, loop in enumerate(run.loops):
        for rank in range(len(CUTS) - 1):
            here = RankInfo(m, run.num_clusters, rank, len(CUTS) - 1)
            shard = shard_loop(loop, run.method, rank)
            load_state(shard, whole / f"{m}", here, {})
            save_state(shard, sharded / f"{m}", here, "run", {}, {})


@pytest.mark.parametrize(
    ("name", "codec"),
    [("one step", "int4, fp32"),
     *(pytest.param(*case, marks=pytest.mark.ci) for case in
       [("one step", "dense"), ("gap, by element", "dense"), ("adaptive rank", "own")])],
)  # fmt: skip
def test_contributions_survive_other_shards(name: str, codec: str, tmp_path: Path) -> None:
    first, second = stopped(name, codec, 2, (0, 1)), new_run(name, codec, 2)
    save_all(first, tmp_path / "whole")
    through_shards(first, tmp_path / "whole", tmp_path / "sharded")
    resume(second, first, tmp_path / "sharded")
    while second.num_steps < NUM_STEPS:
        second.train_step(loss)
    whole = whole_run(name, codec, 2)
    for ours, theirs in zip(second.models, whole.models, strict=True):
        expected = theirs.state_dict()
        got = ours.state_dict()
        assert [n for n in expected if not torch.equal(got[n], expected[n])] == []


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize(
    ("name", "codec"),
    [("one step", "dense"), ("eager", "int4, fp32"),
     *(pytest.param(*case, marks=pytest.mark.ci) for case in
       [("one step", "int4, fp32"), ("adaptive rank", "own")])],
)  # fmt: skip
def test_the_clusters_there_are_now_average(
    name: str, codec: str, after: int, tmp_path: Path
) -> None:
    """One that is new sends what cluster 0 does; who has left has no part in it."""
    first, second = stopped(name, codec, 2, (0, 1)), new_run(name, codec, after)
    sent = [
        next(t.buffers.sent.clone() for t in loop.in_flight if isinstance(t, Transfer))
        for loop in first.loops
    ]
    assert all(lacking(first))
    save_all(first, tmp_path)
    resume(second, first, tmp_path)
    means = [
        next(t.pending.wait() for t in loop.in_flight if isinstance(t, Transfer))
        for loop in second.loops
    ]
    assert all(torch.equal(mean, means[0]) for mean in means)
    if codec == "dense":
        expected = sent[0] if after == 1 else (2 * sent[0] + sent[1]) / 3
        assert torch.allclose(means[0], expected, atol=1e-7)
    for _ in range(4):
        second.train_step(loss)
    second.finish()
    for loop in second.loops[1:]:
        assert torch.equal(loop.state.anchor[0], second.loops[0].state.anchor[0])


def test_factors_that_one_cluster_has_keep_their_layout(tmp_path: Path) -> None:
    first, second = stopped("one step", "low rank", 2, (1,)), new_run("one step", "low rank", 3)
    save_all(first, tmp_path)
    with pytest.raises(
        ValueError,
        match=r"cluster 0, cluster 2 went on from .* the layout and the number of clusters",
    ):
        resume(second, first, tmp_path)
