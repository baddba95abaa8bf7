"""Where a Trainer's run is that begins behind one without dsx, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from dsx.config.files import ConfigError
from dsx.run.hugging_face import checkpoints, synchronous
from dsx.run.hugging_face.sequel import (
    Begun,
    Part,
    SequelSampler,
    begun_of_plain,
    in_order,
    seeded_order,
)
from dsx.run.hugging_face.states import show_to_plain

TOTAL, SEED, PER_STEP = 40, 3, 4
order = seeded_order(SEED)


def read_of(sampler: SequelSampler, at: list[int], until: int) -> list[int]:
    """Return what a Trainer reads from its step on, epoch by epoch of the loader, and skips."""
    found: list[int] = []
    sampler.steps_per_epoch = -(-len(sampler) // PER_STEP)
    while at[0] < until:
        skipped = at[0] % sampler.steps_per_epoch
        batch = list(sampler)
        assert len(batch) == len(sampler) and all(0 <= i < TOTAL for i in batch)
        steps = min(sampler.steps_per_epoch - skipped, until - at[0])
        found += batch[skipped * PER_STEP : (skipped + steps) * PER_STEP]
        at[0] += steps
    return found


@pytest.mark.parametrize("clusters", [1, 2, 3])
@pytest.mark.parametrize(("step", "epoch", "read"), [(3, 0, 12), (7, 2, 20), (10, 1, 0)])
def test_what_was_left_is_read_once_and_then_a_part(
    clusters: int, step: int, epoch: int, read: int
) -> None:
    begun, rest, parts = Begun(step, epoch, read), list[int](), list[int]()
    for cluster in range(clusters):
        part = Part(TOTAL, cluster, clusters)
        size = len(part)
        steps = -(-size // PER_STEP)
        at = [step]
        sampler = SequelSampler(part, begun, order, PER_STEP, lambda at=at: at[0])
        found = read_of(sampler, at, step + 4 * steps)
        again = [step + steps + 1]
        sampler = SequelSampler(part, begun, order, PER_STEP, lambda at=again: at[0])
        resumed = read_of(sampler, again, step + 4 * steps)
        assert resumed == found[len(found) - len(resumed) :]
        left = (TOTAL - read) // clusters if read else 0
        assert len(sampler.rest) == left
        rest += found[:left]
        own = found[left : left + size]
        assert sorted(own) == list(range(cluster, size * clusters, clusters))
        parts += own
    assert len(set(parts)) == len(parts)
    if read:
        seen = order(TOTAL, epoch)[:read]
        assert len({*seen, *rest}) == len(seen) + len(rest) > TOTAL - clusters


def test_data_of_its_own_begins_at_its_first_sample() -> None:
    at = [7]
    sampler = SequelSampler(
        Part(TOTAL, is_own=True), Begun(7, 2, 20), order, PER_STEP, lambda: at[0]
    )
    assert sampler.rest == []
    assert read_of(sampler, at, 7 + TOTAL // PER_STEP) == order(TOTAL, 3)


@pytest.mark.parametrize(
    ("epoch", "batch", "ranks", "drops", "expected"),
    [
        (0.4, 4, 1, False, Begun(7, 0, 16)),
        (2.5, 2, 2, False, Begun(7, 2, 20)),
        (1.0, 4, 1, False, Begun(7, 1, 0)),
        (0.0, 4, 1, False, Begun(7, 0, 0)),
        (3 / 14, 3, 1, False, Begun(7, 0, 9)),  # 14 batches, the last one of one sample
        (12 / 13, 3, 1, True, Begun(7, 0, 36)),
        (13 / 14, 3, 1, False, Begun(7, 0, 39)),
    ],
)
def test_a_place_by_the_trainers_state(
    epoch: float, batch: int, ranks: int, drops: bool, expected: Begun
) -> None:
    state = {"global_step": 7, "epoch": epoch, "train_batch_size": batch}
    assert begun_of_plain(state, ranks, TOTAL, drops) == expected


def make_plain(folder: Path, kind: str = "global_step7", step: int = 7) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step, "epoch": 0.5, "train_batch_size": 4}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "rng_state.pth").touch()
    if kind.startswith("global"):
        (folder / kind).mkdir(exist_ok=True)
    elif kind:
        (folder / kind).touch()
    return folder


class Loader(list[int]):
    """As long as a cluster's batches."""


class Base:
    """As transformers' Trainer."""

    sampler: Any = None

    def __init__(self, **given: Any) -> None:
        settings = SimpleNamespace(use_seedable_sampler=True, split_batches=False)
        arguments = {
            "max_steps": 20, "num_train_epochs": 3.0, "ignore_data_skip": False, "data_seed": SEED,
            "train_batch_size": 2, "world_size": 2, "gradient_accumulation_steps": 1,
            "dataloader_drop_last": False, "accelerator_config": settings,
        }  # fmt: skip
        self.args = SimpleNamespace(**{**arguments, **given})
        self.state = SimpleNamespace(global_step=7)
        self.train_dataset: Any = range(TOTAL)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self.sampler or RandomSampler(range(TOTAL))

    def get_train_dataloader(self) -> Any:
        return Loader(range(5))


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def test_a_trainer_reads_on(tmp_path: Path, first_rank: None) -> None:
    trainer = Base()
    begun = synchronous.begun_at(trainer, make_plain(tmp_path / "checkpoint-7"))
    assert begun == Begun(7, 0, 20)
    begun.write(tmp_path / "checkpoint-9")
    assert Begun.of(tmp_path / "checkpoint-9") == begun and Begun.of(tmp_path) is None
    synchronous.follow(trainer, Base, begun, Part(TOTAL, 1, 2))
    assert len(trainer.get_train_dataloader()) == 5
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    assert list(sampler)[8:] == order(TOTAL, 0)[20:][1::2] + [
        1 + 2 * i for i in order(TOTAL // 2, 1)[:2]
    ]
    trainer.sampler, plain = SequentialSampler(range(TOTAL)), Base()
    plain.sampler = trainer.sampler
    synchronous.follow(plain, Base, begun, Part(TOTAL, 1, 2))
    assert plain._get_train_sampler().rest == in_order(TOTAL, 0)[20:][1::2]


class OwnOrder(Base):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return range(3)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Base, {"max_steps": -1}, r"max_steps=20 reads as many samples"),
        (OwnOrder, {}, r"OwnOrder._get_train_sampler orders the data itself"),
        (Base, {"accelerator_config": SimpleNamespace(use_seedable_sampler=False)},
         r"ordered by RandomSampler, use_seedable_sampler=False"),
        (Base, {"accelerator_config": SimpleNamespace(use_seedable_sampler=True,
         split_batches=True)}, "split_batches=True counts batches otherwise"),
    ],
)  # fmt: skip
def test_an_unknown_order_is_refused(
    kind: Any, given: dict[str, Any], said: str, first_rank: None
) -> None:
    begun, part = Begun(7, 0, 20), Part(TOTAL, 1, 2)
    with pytest.raises(ConfigError, match=said) as caught:
        synchronous.follow(kind(**given), Base, begun, part)
    if "max_steps" not in given:
        assert "ignore_data_skip=True" in str(caught.value)
        synchronous.follow(kind(**given, ignore_data_skip=True), Base, begun, part)


def test_what_else_has_no_place_is_refused(tmp_path: Path) -> None:
    folder = make_plain(tmp_path / "checkpoint-7")
    (folder / "rng_state.pth").unlink()
    with pytest.raises(ValueError, match=r"holds no rng_state\*.pth, by which the number"):
        synchronous.begun_at(Base(), folder)
    assert synchronous.begun_at(Base(ignore_data_skip=True), folder) == Begun(7, 0, 0)
    for ranks in ([2, 3], [0, 2], [0, 1, ""]):  # of the second node alone; one is lost; two runs'
        for file in folder.glob("rng_state*"):
            file.unlink()
        for rank in ranks:
            (folder / f"rng_state_{rank}.pth".replace("_.", ".")).touch()
        with pytest.raises(ValueError, match="which are not those of all ranks"):
            synchronous.begun_at(Base(), folder)
    (folder / "rng_state.pth").unlink()
    assert synchronous.begun_at(Base(), folder) == Begun(7, 0, 16)  # two batches of two ranks
    with pytest.raises(ConfigError, match="the training data is a stream"):
        synchronous.refuse_stream(Base())
    synchronous.refuse_stream(Base(ignore_data_skip=True))
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(state=state))
    with pytest.raises(ConfigError, match="ZeRO stage 3 has the model in parts"):
        synchronous.require_whole_model(trainer, folder)


class World:
    """One of two clusters, of which the other says what it is told to."""

    cluster_id, num_clusters, rank = 0, 2, 0

    def __init__(self, other: Any = "the same") -> None:
        self.rendezvous = SimpleNamespace(
            gather=lambda what, own: [own, own if other == "the same" else other]
        )


def test_which_checkpoint_a_trainer_begins_from(tmp_path: Path) -> None:
    world: Any = World()
    out = tmp_path / "runs" / "cluster_0"
    make_plain(tmp_path / "runs" / "checkpoint-5")
    newest = make_plain(tmp_path / "runs" / "checkpoint-12", "optimizer.pt")
    make_plain(tmp_path / "runs" / "checkpoint-20", "")  # weights only
    other = make_plain(tmp_path / "elsewhere" / "checkpoint-7")
    assert checkpoints.common_checkpoint(str(out), None, world) is None
    assert checkpoints.common_checkpoint(str(out), "True", world) == newest
    assert checkpoints.common_checkpoint(str(out), str(other), world) == other
    assert synchronous.holds_torch_states(newest) and not synchronous.holds_torch_states(other)
    own = out / "checkpoint-14"
    make_plain(own, "")
    (own / "cluster_0" / "global_step14").mkdir(parents=True)
    manifest = {"step": 2, "session": "a", "num_clusters": 2, "format": 1}
    (own / "cluster_0" / "global_step14" / "dsx.json").write_text(json.dumps(manifest))
    assert checkpoints.common_checkpoint(str(out), True, world) == own  # of dsx: goes on
    assert checkpoints.common_checkpoint(str(out), str(other), world) == other  # it is named
    assert not synchronous.is_plain(own)
    (own / "cluster_0" / "latest").write_text("global_step14")
    show_to_plain(own, 0)
    assert (own / "global_step14" / "dsx.json").is_file()
    assert (own / "latest").read_text() == "global_step14"
    show_to_plain(own, 0)
    assert not synchronous.is_plain(own)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([True, None, {}, None, False], "cluster 0: checkpoint-7; cluster 1: none"),
        ([True, None, {}, ["checkpoint-7", "another"], True], "do not find one checkpoint of a T"),
    ],
)
def test_clusters_with_other_copies_are_refused(tmp_path: Path, other: Any, said: str) -> None:
    folder, world = make_plain(tmp_path / "plain" / "checkpoint-7"), World(other)
    with pytest.raises(ValueError, match=said):
        checkpoints.common_checkpoint(str(tmp_path / "runs"), str(folder), world)  # type: ignore[arg-type]


def test_what_clusters_have_is_not_left_for_a_plain_one_unless_that_is_named(
    tmp_path: Path,
) -> None:
    """One cluster has lost its disk, and the others' steps are not done anew without a word."""
    plain = make_plain(tmp_path / "runs" / "checkpoint-7")
    lost = [True, None, {}, synchronous.identity(plain), False]
    own = make_plain(tmp_path / "runs" / "cluster_0" / "checkpoint-14", "")
    (own / "cluster_0" / "global_step14").mkdir(parents=True)
    manifest = {"step": 2, "session": "a", "num_clusters": 2, "format": 1}
    (own / "cluster_0" / "global_step14" / "dsx.json").write_text(json.dumps(manifest))
    world: Any = World(lost)
    said = r"\(cluster 0: checkpoint-14; cluster 1: none\).*name the plain one"
    with pytest.raises(ValueError, match=said):
        checkpoints.common_checkpoint(str(own.parent), True, world)
    lost[-1] = True
    assert checkpoints.common_checkpoint(str(own.parent), str(plain), world) == plain


def test_weights_alone_are_not_begun_from(tmp_path: Path) -> None:
    folder, world = make_plain(tmp_path / "plain" / "checkpoint-7", ""), World()
    with pytest.raises(ValueError, match="none of a Trainer without dsx, with its optimizer, is"):
        checkpoints.common_checkpoint(str(tmp_path / "runs"), str(folder), world)  # type: ignore[arg-type]
