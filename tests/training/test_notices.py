"""Notices take effect at one step everywhere, within the bound that training/notices.py tells."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsx.comm.in_process import InProcessHub, start_together, step_together
from dsx.core.membership import Membership
from dsx.core.types import Stage
from dsx.engines.cluster_collectives import OneRank
from dsx.engines.torch import TorchAdapter
from dsx.outer.loop import OuterLoop
from dsx.outer.notices import Notice, NoticeCarrier
from dsx.outer.transfer import Transfer
from dsx.training.early_stop import StopAgreement
from dsx.training.notices import Due, Notices
from tests.levels import by_default
from tests.tiny import CASES, TinyNet, mean_loss

STEPS = 60


class Part:
    """One part of every cluster: all of it, or one pipeline stage, as `stage` says."""

    def __init__(self, name: str, num_clusters: int, stage: Stage, clusters: list[Any]) -> None:
        method = CASES[name].method(num_clusters)
        self.bound = method.delay.steps + method.schedule.interval * (
            1 + method.delay.rounds_under_way + (stage.count > 1)
        )
        self.models = [TinyNet() for _ in range(num_clusters)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        transports = InProcessHub(Membership.of(num_clusters)).transports()
        self.loops: list[OuterLoop] = []
        self.notices: list[Notices] = []
        for cluster, transport in enumerate(transports):
            model, optimizer = self.models[cluster], self.optimizers[cluster]
            adapter = TorchAdapter(model, optimizer, method.fragments, method.schedule.backwards)
            adapter.stage = stage
            loop = OuterLoop(method, adapter, transport)
            self.loops.append(loop)
            interval = method.schedule.interval
            place = (cluster, stage.index)
            self.notices.append(Notices(loop.notices, place, interval, clusters[cluster]))
        start_together(self.loops)

    def train(self, first: int, last: int, asked: dict[int, list[tuple[int, str]]]) -> list[Any]:
        """Take steps; return what was due, by cluster. `asked`: by step, before it, who what."""
        due: list[list[Due]] = [[] for _ in self.loops]
        for step in range(first, last + 1):
            for cluster, text in asked.get(step, ()):
                self.notices[cluster].post("word", {"text": text})
            for cluster, model in enumerate(self.models):
                self.optimizers[cluster].zero_grad()
                mean_loss(model, cluster, step).backward()
                self.optimizers[cluster].step()
            step_together(self.loops)
            for loop in self.loops:
                loop.adapter.end_inner_step()
            for cluster, notices in enumerate(self.notices):
                notices.pass_boundary(step)
                due[cluster] += notices.due("word")
        return due


@pytest.mark.parametrize("num_clusters", by_default([1, 3], 3))
@pytest.mark.parametrize(
    "name", ["diloco", "streaming_diloco", "eager", "co2", "cocodc", "dreamddp"]
)
def test_all_clusters_get_it_at_the_same_step(name: str, num_clusters: int) -> None:
    part = Part(name, num_clusters, Stage(), [None] * num_clusters)
    last = num_clusters - 1
    asked = {7: [(last, "one")], 20: [(last, "three"), (0, "two")], 21: [(0, "four")]}
    first, *others = part.train(1, STEPS, asked)
    assert all(due == first for due in others)
    assert sorted(due.payload["text"] for due in first) == ["four", "one", "three", "two"]
    for due in first:
        posted = {"one": 7, "two": 20, "three": 20, "four": 21}[due.payload["text"]]
        assert posted <= due.step < posted + part.bound
        assert due.cluster == (last if due.payload["text"] in ("one", "three") else 0)
    assert first == sorted(first, key=lambda due: (due.step, due.cluster, due.rank))


class Meeting:
    """Stands in for a cluster's two ranks, each of which is a thread here."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._values: dict[int, Any] = {}

    def any(self, what: str, is_so: bool) -> bool:
        return any(self.gather(what, is_so))

    def gather(self, what: str, value: Any) -> list[Any]:
        self._values[threading.get_ident()] = json.loads(json.dumps(value))
        self._barrier.wait()
        everyone = list(self._values.values())
        self._barrier.wait()
        return everyone


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "co2"])
def test_stages_that_launch_apart_get_it_at_the_same_step(name: str) -> None:
    meetings = [Meeting(), Meeting()]
    parts = [Part(name, 2, Stage(index, 2), meetings) for index in range(2)]
    asked = [{9: [(0, "first"), (1, "stage")]}, {9: [(1, "second")], 10: [(0, "stage")]}]
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(p.train, 1, STEPS, a) for p, a in zip(parts, asked, strict=True)]
        told = [due for job in jobs for due in job.result()]
    assert all(due == told[0] for due in told)
    assert sorted(d.payload["text"] for d in told[0]) == ["first", "second", "stage", "stage"]
    assert all(9 <= due.step < 10 + parts[0].bound for due in told[0])


def test_what_was_under_way_at_a_load_is_said_again() -> None:
    part = Part("streaming_diloco", 2, Stage(), [None, None])
    before = part.train(1, 9, {9: [(1, "word")]})  # launched at 9, due at 11
    assert before == [[], []]
    assert any(getattr(t, "launched", 0) == 9 for t in part.loops[0].in_flight)
    for loop in part.loops:
        for transfer in loop.in_flight:
            if isinstance(transfer, Transfer):
                transfer.buffers.is_free = True
        loop.restore(replace(loop.history), loop._nothing_yet())
    first, second = part.train(10, 40, {})
    assert first == second and [due.payload["text"] for due in first] == ["word"]


class Ranks(OneRank):
    """Two ranks of a cluster, of which one owns nothing that is sent."""

    def __init__(self) -> None:
        self.carriers: list[NoticeCarrier] = []

    def gather(self, value: Any) -> Any:
        return [(list(c._heard), list(c._unsaid)) for c in self.carriers]


def test_a_rank_that_sends_nothing_is_heard_through_the_others() -> None:
    ranks = Ranks()
    ranks.carriers = sender, silent = [NoticeCarrier(ranks) for _ in range(2)]
    silent.post(Notice(0, 1, 0, "word", '"hear me"'))
    assert not sender.hear({}) and silent.hear({})  # one has news: both agree
    for carrier in ranks.carriers:
        carrier.agree()
    said = sender.to_say()
    assert b"hear me" in said and sender.to_say() == b""
    sender.hear({0: said})
    silent.hear({})
    for carrier in ranks.carriers:
        carrier.agree()
    told = [carrier.take_agreed() for carrier in ranks.carriers]
    assert told[0] == told[1] and told[0][0].payload == "hear me"
    assert silent.to_say() == b""  # it is known by now


def test_a_notice_is_short() -> None:
    with pytest.raises(ValueError, match=r"a notice 'word' of 50\d\d bytes: at most 4096 go with"):
        NoticeCarrier(OneRank()).post(Notice(0, 0, 0, "word", '"' + 5000 * "x" + '"'))


def test_a_stop_that_was_passed_is_refused() -> None:
    part = Part("diloco", 2, Stage(), [None, None])
    stops = [StopAgreement(notices, speaks=False) for notices in part.notices]
    stops[1].request("enough")
    stops[1].request("more than that")  # the first counts
    part.train(1, 4, {})
    assert stops[0].is_due(4) and stops[0].is_due(5)
    part.train(5, 5, {})
    with pytest.raises(RuntimeError, match="cluster 1 asked for a stop, agreed on for step 4"):
        stops[1].is_due(5)
