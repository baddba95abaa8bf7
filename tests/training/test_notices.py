"""Notices take effect at one step everywhere, within the bound that training/notices.py tells."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
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
from dsx.training.keeping import Keeping
from dsx.training.notices import Due, Notices
from tests.checkpoint.test_keep import steps
from tests.checkpoint.test_tags import write
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
    load(part)
    first, second = part.train(10, 40, {})
    assert first == second and [due.payload["text"] for due in first] == ["word"]


def load(part: Part) -> None:
    """Go on as behind a checkpoint of this very step, with nothing under way."""
    for loop in part.loops:
        for transfer in loop.in_flight:
            if isinstance(transfer, Transfer):
                transfer.buffers.is_free = True
        loop.restore(replace(loop.history), loop._nothing_yet())


def test_what_is_taken_back_at_a_load_takes_effect_nowhere() -> None:
    part = Part("streaming_diloco", 2, Stage(), [None, None])
    part.train(1, 9, {9: [(1, "of before"), (0, "another's")]})
    load(part)
    for notices in part.notices:
        notices.post("word", {"text": "of before"})  # not launched yet
        notices.take_back("word", lambda told: told["text"] == "of before")
    first, second = part.train(10, 40, {})
    assert first == second and [due.payload["text"] for due in first] == ["another's"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_told_before_a_load_does_not_count_for_what_is_saved_again(
    keep: int, tmp_path: Path
) -> None:
    """Cluster 1's word of its step 9 is under way as all load step 4, and save step 9 again."""
    part = Part("streaming_diloco", 2, Stage(), [None, None])
    clusters = [Keeping(one, lambda: (0, 1), True, keep, lambda _: None) for one in part.notices]

    def save(cluster: int, step: int) -> None:
        write(tmp_path, cluster, step)
        clusters[cluster].saved(tmp_path / f"cluster_{cluster}" / f"step{step}", step)

    def held() -> list[list[int]]:
        for keeping in clusters:
            keeping.close()
        return [steps(tmp_path / f"cluster_{m}") for m in range(2)]

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            part.train(step, step, {})
            for keeping in clusters:
                keeping.pass_boundary()

    for cluster in range(2):
        for step in (2, 4)[-keep:]:
            write(tmp_path, cluster, step)
    train(1, 8)
    save(1, 9)
    train(9, 9)  # said, and due at 11
    load(part)
    for m, keeping in enumerate(clusters):
        for step in (2, 4)[-keep:]:
            keeping.loaded(tmp_path / f"cluster_{m}" / f"step{step}", step)
    save(0, 9)
    before = held()
    train(10, 24)
    assert held() == before
    save(1, 9)
    train(25, 40)
    assert held() == [[4, 9][-keep:]] * 2


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
    silent.post(Notice(0, 1, 1, "word", '"of before"'))
    for carrier in ranks.carriers:
        carrier.agree()
    for carrier in ranks.carriers:  # each rank, whoever was to take it along
        carrier.drop(lambda notice: notice.payload == "of before")
    assert sender.to_say() == silent.to_say() == b""


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
