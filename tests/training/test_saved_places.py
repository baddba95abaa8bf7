"""Places in the data of what a checkpoint holds: other clusters go on from it, and read on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.outer_state import load_state
from dsx.comm.gloo import GlooTransport
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset
from dsx.data import ClusterBatches
from dsx.data.deal import Deal, Stretch
from dsx.engines.torch import TorchAdapter
from dsx.outer.loop import OuterLoop
from dsx.outer.saved_places import AgreedPlaces, SavedPlaces
from dsx.outer.transfer import Transfer
from dsx.training.dealing import follow_boundaries, restore_data
from tests.checkpoint.saved import save_state
from tests.comm.threads import over_gloo
from tests.data.test_cluster_batches import Numbers
from tests.tiny import TinyNet

WINDOWS = 180
DEALS = "deals"


@dataclass
class Run:
    """Clusters of one process, a thread each, from the beginning or from what others have saved."""

    folder: Path
    name: str
    num_clusters: int
    steps: Mapping[int, int]  # by cluster, to which it trains
    load: str = ""
    sources: Mapping[int, int] = field(default_factory=dict[int, int])  # who takes another's
    saved_by: int = 0  # so many clusters
    is_preempted: bool = False
    waits: bool = True  # for what is under way, before it saves
    read: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    deals: dict[int, Any] = field(default_factory=dict[int, Any])
    places: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def __post_init__(self) -> None:
        over_gloo(self.num_clusters, self._train, fragments=(0, 1))

    def _train(self, transport: GlooTransport) -> None:
        id, count = transport.seat.cluster_id, self.num_clusters
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        method = preset(
            "streaming_diloco", count, schedule={"interval": 4}, delay={"steps": 3},
            fragments={"by": "size", "num_fragments": 2},
        )  # fmt: skip
        adapter = TorchAdapter(model, optimizer, method.fragments, method.schedule.backwards)
        loop = OuterLoop(method, adapter, transport)
        batches = ClusterBatches(
            Numbers(WINDOWS), 1, cluster_id=id, num_clusters=count, rank=0, world_size=1, seed=3
        )
        loop.notices.places.follow("data", batches, id, count, 16)
        follow_boundaries(loop)
        loop.start()
        if self.load:
            self._load(loop, batches, id)
        read = self.read[id] = []
        while loop.history.step < self.steps[id]:
            read.append(int(next(batches)[0, 0]))
            optimizer.zero_grad()
            model(torch.full((1, 6), read[-1] / WINDOWS)).square().mean().backward()
            optimizer.step()
            loop.after_inner_step()
            adapter.end_inner_step()
        self.deals[id] = loop.notices.places.state_dict()["data"]
        self.places[id] = batches.place()
        self._save(loop, batches, id)
        for transfer in loop.in_flight:
            if isinstance(transfer, Transfer) and self.waits:
                transfer.pending.wait()
        transport.gather("the end of a test", id)()

    def _save(self, loop: OuterLoop, batches: ClusterBatches, id: int) -> None:
        until = time.monotonic() + 30
        under_way = [t.pending for t in loop.in_flight if isinstance(t, Transfer)]
        while self.waits and not all(pending.has_arrived for pending in under_way):
            assert time.monotonic() < until
            time.sleep(0.005)
        tracked = {"data": batches.state_dict(), DEALS: loop.notices.places.saved_state()}
        rank_info = RankInfo(id, self.num_clusters, 0, 1)
        save_state(
            loop, self.folder / self.name / str(id), rank_info, "run", {}, tracked,
            keeps_last=self.is_preempted,
        )  # fmt: skip

    def _load(self, loop: OuterLoop, batches: ClusterBatches, id: int) -> None:
        source = self.sources.get(id, id)
        directory = self.folder / self.load / str(source)
        states = dict(load_state(loop, directory, RankInfo(id, self.num_clusters, 0, 1), {}))
        restore_data(
            loop, {"data": batches}, directory, states, states.pop(DEALS), source != id,
            self.saved_by != self.num_clusters,
        )  # fmt: skip
        loop.settle()


def alike(run: Run) -> Any:
    """Return the deal that all of a run hold."""
    first, *others = run.deals.values()
    assert all(one == first for one in others)
    return first


@pytest.mark.parametrize("then", [2, 4])
def test_what_a_mean_contains_that_has_come_is_not_read_again(tmp_path: Path, then: int) -> None:
    """Cluster 2 is gone; its last part is in means that have come and are not applied yet."""
    first = Run(tmp_path, "first", 3, dict.fromkeys(range(3), 8))
    sources = {2: 0} if then > 2 else {}
    sources |= {3: 0} if then > 3 else {}
    steps = dict.fromkeys(range(then), 8 + (WINDOWS - 24) // then - 6)
    second = Run(tmp_path, "second", then, steps, load="first", sources=sources, saved_by=3)
    alike(second)
    times = Counter(one for run in (first, second) for read in run.read.values() for one in read)
    assert [one for one, count in times.items() if count > 1] == []


@pytest.mark.parametrize("then", [2, 3, 4])
def test_clusters_that_saved_at_different_steps_go_on_from_one_deal(
    tmp_path: Path, then: int
) -> None:
    """Cluster 1 has applied a launch that the others have not, and so knows of later places."""
    first = Run(tmp_path, "first", 3, {0: 8, 1: 9, 2: 8}, is_preempted=True)
    assert first.deals[0] != first.deals[1]
    sources = {m: 0 for m in range(3, then)}
    steps = dict.fromkeys(range(then), 30)
    second = Run(tmp_path, "second", then, steps, load="first", sources=sources, saved_by=3)
    alike(second)
    times = Counter(one for run in (first, second) for read in run.read.values() for one in read)
    assert [one for one, count in times.items() if count > 1] == []


def saved(
    cluster: int, deal: Deal, launched: int, under_way: list[int], **more: Any
) -> SavedPlaces:
    """Return what a cluster's checkpoint says: by default it has read what the deal says."""
    share = deal.shares[cluster]
    own = [share.place, share.read, [one.plain() for one in share.left]]
    deals = {"data": {**deal.state_dict(), "own": own}}
    given: dict[str, Any] = {"told": [], "foreign": [], "takes_others": False, **more}
    return SavedPlaces(cluster, deals, step=4 * launched, launched=launched, under_way=under_way,
                       **given)  # fmt: skip


def of_two() -> tuple[Deal, Deal]:
    """Return a deal as of launch 4, of which cluster 2 has no part, and as of launch 5."""
    before = Deal(3, 100, 10)
    for number in range(1, 5):
        told = {id: (4 * number, 0) for id in range(3 if number < 4 else 2)}
        before.hear(number, [*told], told, {}, number)
    after = Deal.of_state(before.state_dict())
    after.hear(5, [0, 1], {0: (20, 0), 1: (20, 0)}, {}, 5)
    assert after.pass_boundary(6) == {0: [Stretch(2, 12, 20)]}
    return before, after


def test_of_one_step_the_deal_counts_of_who_has_applied_more() -> None:
    """One has stopped in the midst of the boundary: what was dealt there is its, too."""
    before, after = of_two()
    both = [saved(0, before, 5, [5]), saved(1, after, 5, [])]
    deal = AgreedPlaces(both).deal("data")
    assert deal.state_dict() == after.state_dict()
    standing = AgreedPlaces(both).standing("data", deal)
    assert standing == {0: (16, [Stretch(2, 12, 20)]), 1: (20, [])}


def test_places_beside_a_mean_count_where_nobody_has_applied_it() -> None:
    before, after = of_two()
    told = [(5, {"0": {"data": [20, 0, 100]}, "2": {"data": [19, 0, 100]}})]
    apart = AgreedPlaces([saved(0, before, 5, [5]), saved(1, before, 5, [5], told=told)])
    assert [share.place for share in apart.deal("data").shares] == [20, 16, 19]
    applied = AgreedPlaces([saved(0, before, 5, [5], told=told), saved(1, after, 5, [])])
    assert applied.deal("data").state_dict() == after.state_dict()


def test_checkpoints_that_are_cut_otherwise_are_refused_by_name() -> None:
    other = saved(1, Deal(3, 100, 5), 4, [])
    with pytest.raises(ValueError, match="cluster 1: .*100 samples in 5 shards.*load one checkpoi"):
        AgreedPlaces([saved(0, Deal(3, 100, 10), 4, []), other])
    foreign = saved(1, Deal(3, 100, 10), 4, [], foreign=["data"])
    with pytest.raises(ValueError, match="cluster 1: .*of other data.*give them the same data"):
        AgreedPlaces([saved(0, Deal(3, 100, 10), 4, []), foreign])
