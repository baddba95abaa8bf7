"""A run is resumed with fewer or more clusters, and each window of the epoch is read once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsx.data import ClusterBatches
from dsx.data.deal import Deal
from dsx.data.recut import Standing, recut
from tests.data.test_cluster_batches import Setup
from tests.data.test_deal import whole

SETUP = Setup(num_windows=480, num_clusters=4, world_size=1, micro_batch_size=1, seed=3)


def read(batches: ClusterBatches, count: int) -> list[int]:
    return [int(next(batches)[0, 0]) for _ in range(count)]


def begin(deal: Deal, setup: Setup) -> list[ClusterBatches]:
    """Return what each cluster reads by a deal."""
    made = [setup.batches(id, 0) for id in range(setup.num_clusters)]
    for share, batches in zip(whole(deal).shares, made, strict=True):
        batches.begin_at(share.place, share.read, share.left)
    return made


def standings(deal: Deal, ids: range, made: list[ClusterBatches]) -> dict[int, Standing]:
    return {id: (made[id].place()[0], made[id].left()) for id in ids}


@pytest.mark.parametrize("then", [1, 3, 5, 6])
def test_every_window_of_the_epoch_is_read_once(then: int) -> None:
    deal = Deal(4, 120, 16)
    before = begin(deal, SETUP)
    seen = [window for batches in before for window in read(batches, 50)]
    for share in deal.shares:
        share.place = 47  # what is committed; those who go on know better
    stay = range(min(then, 4))
    uncommitted = [window for id in range(4) if id not in stay for window in read_at(id, 47, 50)]
    setup = replace(SETUP, num_clusters=then)
    new = recut(deal, standings(deal, stay, before), then, 480 // then)
    after = begin(new, setup)
    loads = [sum(one.stop - one.start for one in share.held) for share in new.shares]
    assert max(loads) - min(loads) <= 2 * 8  # shards of 8
    for batches, load in zip(after, loads, strict=True):
        seen += read(batches, load)
        assert batches.place() == (480 // then, load)
    assert sorted(seen) == sorted([*range(480), *uncommitted])
    following = [window for batches in after for window in read(batches, 480 // then)]
    assert sorted(following) == list(range(480))


def read_at(id: int, start: int, stop: int) -> list[int]:
    batches = SETUP.batches(id, 0)
    return read(batches, stop)[start:]


def test_another_change_while_that_epoch_is_not_read_to_its_end() -> None:
    deal = Deal(4, 120, 16)
    made = begin(deal, SETUP)
    seen = [window for batches in made for window in read(batches, 30)]
    for then in (5, 2, 3):
        new = recut(deal, standings(deal, range(min(len(made), then)), made), then, 480 // then)
        gone = [one for id in range(then, len(made)) for one in made[id].left()]
        assert all(one.among == 4 for one in gone)
        deal, made = new, begin(new, replace(SETUP, num_clusters=then))
        if then < 3:
            break
        seen += [window for batches in made for window in read(batches, 12)]
        for share in deal.shares:
            share.read = 12  # all of it is committed
            saved = json.loads(json.dumps(made[0].state_dict()))
            again = replace(SETUP, num_clusters=then).batches(0, 0)
            again.load_state_dict(saved)
            assert again.left() == made[0].left()
    for share, batches in zip(deal.shares, made, strict=True):
        seen += read(batches, sum(one.stop - one.start for one in share.held))
    assert sorted(seen) == list(range(480))
