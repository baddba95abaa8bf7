"""What a lost cluster has not committed is read by the others, and nothing that it has is."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.data.deal import Deal, Dealt, Stretch
from dsx.data.reading import Others
from tests.data.test_cluster_batches import Setup

Sample = tuple[int, int]  # whose sequence, and the place there


def whole(deal: Deal) -> Deal:
    """Return it as it is after a copy, which has to say the same from there on."""
    return Deal.of_state(json.loads(json.dumps(deal.state_dict())))


@dataclass
class Reader:
    """One process of a cluster: reads as it is dealt, and tells its place."""

    id: int
    place: int
    others: Others = field(default_factory=Others)
    read: list[Sample] = field(default_factory=list[Sample])

    def step(self, count: int) -> None:
        taken = [(one.of, one.start) for one in self.others.take(count)]
        missing = count - len(taken)
        self.read += [*taken, *((self.id, self.place + i) for i in range(missing))]
        self.place += missing


@dataclass
class Launch:
    """A transfer: who averages, where they are, what they have read, who knows of whom."""

    number: int
    applied_at: int
    ids: set[int]
    told: dict[int, tuple[int, int]]
    read: dict[int, list[Sample]]
    coming: dict[int, int]


class Run:
    """Clusters in step, of which some are lost and come back; what is committed is counted."""

    def __init__(
        self, num_clusters: int, epoch: int, shards: int, interval: int, delay: int, chance: int
    ) -> None:
        self.deal = Deal(num_clusters, epoch, shards)
        self.readers = {id: Reader(id, 0) for id in range(num_clusters)}
        self.interval, self.delay = interval, delay
        self.chance = random.Random(chance)
        self.committed: Counter[Sample] = Counter()
        self.done: dict[int, int] = {}  # by reader, of what it has read
        self.under_way: list[Launch] = []
        self.healing: dict[int, int] = {}  # since which step
        self.known: dict[int, int] = {}  # by those who train: the process that has asked last
        self.processes = 0
        self.step = self.number = 0

    def take_step(self) -> None:
        self.step += 1
        for reader in self.readers.values():
            reader.step(self.chance.choice([2, 3, 3]))
        if self.step % self.interval == 0:
            self.number += 1
            ids = {*self.readers}
            self.under_way.append(Launch(
                self.number, self.step + self.delay, ids,
                {id: (r.place, r.others.read) for id, r in self.readers.items()},
                {id: [*r.read] for id, r in self.readers.items()},
                {**self.known},
            ))  # fmt: skip
        while self.under_way and self.under_way[0].applied_at <= self.step:
            launch = self.under_way.pop(0)
            ids = sorted(launch.ids)
            for id in ids:
                if id not in self.healing:
                    self.known.pop(id, None)
            for id in ids:  # of a process, all that it had read by then and that was not counted
                read, done = launch.read[id], self.done.get(id, 0)
                self.committed.update(read[done:])
                self.done[id] = max(done, len(read))
            told = {id: place for id, place in launch.told.items() if id in launch.ids}
            self.deal.hear(launch.number, ids, told, launch.coming, self.number)
        self.deal = whole(self.deal)
        first = min((launch.number for launch in self.under_way), default=float("inf"))
        for id, stretches in self.deal.pass_boundary(first).items():
            if id in self.readers:  # else it is gone, and nobody knows yet
                self.readers[id].others.add(stretches)
        for id, since in [*self.healing.items()]:
            if self.deal.may_come(id, self.known[id]) and self.step > since + 2:
                del self.healing[id]
                share = self.deal.shares[id]
                self.readers[id], self.done[id] = Reader(id, share.place), 0
                for launch in self.under_way:  # they have their part from the next launch on
                    assert id not in launch.ids

    def start_again(self, id: int) -> None:
        """Start another process, which asks the others at once."""
        self.processes += 1
        self.healing[id], self.known[id] = self.step, self.processes

    def lose(self, id: int) -> None:
        """End a process: of what is under way some is committed with its part, some without."""
        del self.readers[id]
        kept = self.chance.randrange(len(self.under_way) + 1)
        for launch in self.chance.sample(self.under_way, len(self.under_way) - kept):
            launch.ids.discard(id)


@given(
    st.integers(2, 5), st.integers(7, 400), st.integers(1, 20), st.integers(1, 6),
    st.integers(0, 9), st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_nothing_is_committed_twice_and_nothing_is_left_out(
    num_clusters: int, epoch: int, shards: int, interval: int, delay: int, seed: int
) -> None:
    run = Run(num_clusters, epoch, shards, interval, delay, seed)
    for _ in range(400):
        run.take_step()
        lot = run.chance.random()
        if lot < 0.04 and len(run.readers) > 1:
            run.lose(run.chance.choice(sorted(run.readers)))
        away = {*range(num_clusters)} - run.readers.keys() - run.healing.keys()
        if away and lot > 0.93:
            run.start_again(run.chance.choice(sorted(away)))
        if run.healing and 0.5 < lot < 0.51:  # it dies while it heals
            del run.known[min(run.healing)], run.healing[min(run.healing)]
    for _ in range(3 * (interval + delay)):
        run.take_step()
    assert {count for count in run.committed.values()} == {1}
    held = {s for share in run.deal.shares for s in share.left} | {*run.deal.left_behind}
    to_come = {(s.of, place) for s in held for place in range(s.start, s.stop)}
    for id, share in enumerate(run.deal.shares):
        missing = {(id, place) for place in range(share.place)} - run.committed.keys()
        assert missing <= to_come  # somebody reads it next
    assert not to_come & run.committed.keys()


def test_all_sequences_go_on_at_one_pace() -> None:
    run = Run(4, 1600, 16, 4, 2, 0)
    for _ in range(40):
        run.take_step()
    run.lose(2)
    for _ in range(1500):
        run.take_step()
    places = [share.place for share in run.deal.shares]
    assert max(places) - min(places) < 2 * 100  # places of one shard are dealt at a time
    assert min(places) > 1600


def test_without_a_loss_nothing_is_dealt() -> None:
    run = Run(3, 50, 16, 4, 3, 1)
    for _ in range(100):
        run.take_step()
    for id, reader in run.readers.items():
        assert reader.read == [(id, place) for place in range(reader.place)]


def test_a_cluster_reads_what_another_has_left_in_its_order_and_then_goes_on() -> None:
    setup = Setup(num_windows=101, num_clusters=3, world_size=2, micro_batch_size=2, seed=5)
    theirs = [row for _ in range(9) for row in rounds(setup, 1)[1][_]]
    ranks = setup.cluster(0)
    assert all(isinstance(one, Dealt) and one.samples_per_epoch == 33 for one in ranks)
    plain, own = rounds(setup, 0)[1], []
    own += [next_round(ranks) for _ in range(2)]
    for one in ranks:
        one.take_over([Stretch(1, 5, 11), Stretch(1, 20, 23)])
    own += [next_round(ranks) for _ in range(2)]
    assert own[2] == theirs[5:9] and own[3] == theirs[9:11] + theirs[20:22]
    saved = [json.loads(json.dumps(one.state_dict())) for one in ranks]
    assert ranks[0].place() == (8, 8)
    then = [next_round(ranks) for _ in range(9)]
    again = setup.cluster(0)
    for one, state in zip(again, saved, strict=True):
        one.load_state_dict(state)
    assert [next_round(again) for _ in range(9)] == then
    assert then[0] == [theirs[22], *plain[2][:3]]
    assert ranks[0].place()[1] == 9


def rounds(setup: Setup, cluster_id: int) -> tuple[int, list[list[int]]]:
    """Return what a cluster reads by itself, round by round."""
    ranks = setup.cluster(cluster_id)
    return setup.num_rounds(), [next_round(ranks) for _ in range(12)]


def next_round(ranks: list) -> list[int]:
    """Return the windows of a round in the order that all ranks share."""
    read = [next(one)[:, 0].tolist() for one in ranks]
    return [row for rows in zip(*read, strict=True) for row in rows]


def test_data_of_a_clusters_own_is_not_dealt() -> None:
    assert Setup(50, 1, 1, 1, 0).batches(0, 0).samples_per_epoch is None


def test_what_cannot_be_dealt_is_said() -> None:
    with pytest.raises(ValueError, match="num_shards=0"):
        Deal(2, 5, 0)
