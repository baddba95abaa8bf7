"""`training_data` that a lost cluster has left is read by the others' loaders of DeepSpeed."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import torch

from dsx.data.cluster_batches import ClusterShard
from dsx.data.deal import Dealt, Stretch
from dsx.engines.deepspeed import data
from dsx.engines.deepspeed.data import DataPosition
from dsx.engines.deepspeed.loader import ResumableLoader
from tests.installed import needs

pytestmark = needs("deepspeed")

BATCH, RANKS, NUM_SAMPLES = 3, 2, 3 * 50


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def ranks_of(cluster: int) -> list[tuple[Any, DataPosition]]:
    """Return the loaders of a cluster's ranks, as the engine makes them, with their positions."""
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    made: list[tuple[Any, DataPosition]] = []
    for rank in range(RANKS):
        shard = ClusterShard(Samples(), cluster, 3)
        loader = DeepSpeedDataLoader(
            shard, BATCH, False, 0, None, num_local_io_workers=0, data_parallel_world_size=RANKS,
            data_parallel_rank=rank,
        )  # fmt: skip
        resumable = ResumableLoader(loader, RANKS)
        made.append((resumable, DataPosition(resumable, shard, lambda: 0)))
    return made


def endless(loader: Any) -> Any:
    while True:
        yield from loader


def read(loaders: list[Any], num_batches: int) -> list[int]:
    """Return what all ranks read, in the order that they share."""
    taken: list[int] = []
    for _ in range(num_batches):
        batches = [next(loader).tolist() for loader in loaders]
        taken += [sample for samples in zip(*batches, strict=True) for sample in samples]
    return taken


def sequence(cluster: int, count: int) -> list[int]:
    """Return a cluster's first samples, of an epoch or two."""
    shard = ClusterShard(Samples(), cluster, 3)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    return [int(shard[i]) for i in [*order, *order]][:count]


def test_what_is_left_is_read_next_and_then_its_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(data, "gather_objects", lambda value: [value])
    ranks = ranks_of(1)
    assert all(isinstance(one, Dealt) and one.samples_per_epoch == 50 for _, one in ranks)
    loaders = [endless(loader) for loader, _ in ranks]
    before = read(loaders, 2)
    assert before == sequence(1, 12)
    for _, position in ranks:
        position.take_over([Stretch(2, 5, 15), Stretch(0, 55, 60)])
    theirs = sequence(2, 15)[5:] + sequence(0, 60)[55:]
    assert read(loaders, 2) == theirs[:12]
    saved = [json.loads(json.dumps(position.state_dict())) for _, position in ranks]
    assert [position.place() for _, position in ranks] == [(12, 12)] * 2
    rest = read(loaders, 6)
    assert rest == [*theirs[12:], *sequence(1, 45)[12:]]
    assert ranks[0][1].place() == (45, 15)
    again = ranks_of(1)
    for (_, position), state in zip(again, saved, strict=True):
        position.load_state_dict(state)
    assert read([endless(loader) for loader, _ in again], 6) == rest


def test_a_cluster_that_comes_back_begins_where_the_others_say() -> None:
    ranks = ranks_of(0)
    for _, position in ranks:
        position.begin_at(50 + 18, 4, [Stretch(1, 3, 5)])
    loaders = [endless(loader) for loader, _ in ranks]
    assert read(loaders, 2) == [*sequence(1, 5)[3:], *sequence(0, 28)[18:]]
    assert ranks[1][1].place() == (78, 6)


def test_a_place_between_the_ranks_turns_is_exact() -> None:
    """One sample is not read again because a rank would come to it by turns."""
    ranks = ranks_of(0)
    for _, position in ranks:
        position.begin_at(15, 0, [])
    loaders = [endless(loader) for loader, _ in ranks]
    assert read(loaders, 5) == sequence(0, 45)[15:]
    assert ranks[0][1].place() == (45, 0)


def test_the_end_of_an_epoch_is_as_long_on_all_ranks() -> None:
    """Also where less than one sample for each of them is left."""
    ranks = ranks_of(0)
    for loader, _ in ranks:
        loader.consumed, loader._sampler.num_replicas = 50, 4
        loader._read_first([7])
    assert [one._sampler.rest for one, _ in ranks] == [[7], [7]]


def test_without_a_loss_the_order_is_that_of_deepspeed() -> None:
    (loader, position), _ = ranks_of(2)
    plain = ranks_of(2)[0][0]._loader
    first = [batch.tolist() for batch in loader]
    assert first == [batch.tolist() for batch in plain]
    assert position.place() == (50, 0) and loader.epoch == 1
    list(islice(loader, 2))
    assert position.place() == (50 + 2 * BATCH * RANKS, 0)
