"""What keeps Megatron from saving is seen before it begins, and ends no run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dsx.checkpoint.tags import complete_tags
from dsx.config.schema import load_config
from dsx.engines.megatron import own_part
from dsx.engines.megatron.own_part import MegatronPart, latest_iteration, tag_of
from dsx.engines.megatron_model.dist_checkpoint import TRACKER
from dsx.training.saving import Saving as OfDsx
from megatron_patches import checkpoint, room
from tests.engines.test_megatron_resume_point import outer
from tests.installed import needs


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_first(value: Any) -> Any:
        return value

    monkeypatch.setattr(room, "from_first", of_first)


def saved(directory: Path, iteration: int, num_bytes: int) -> None:
    folder = directory / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(num_bytes))
    (directory / TRACKER).write_text(f"{iteration}\n")


def outer_state(directory: Path, iteration: int, num_bytes: int = 10) -> Path:
    outer(directory, 1, iteration)
    state = directory / "dsx" / "cluster_1" / tag_of(iteration)
    (state / "outer").write_bytes(bytes(num_bytes))
    return state


def test_a_disk_with_less_space_than_the_last_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = tmp_path / "dsx" / "cluster_0"
    assert room.find_obstacle(tmp_path / "new", states, True) == ""
    saved(tmp_path, 10, 5_000_000)
    assert room.find_obstacle(tmp_path, states, True) == ""
    assert [path.name for path in tmp_path.glob("*.tmp")] == []

    def little(path: Path) -> Any:
        return SimpleNamespace(free=4_000_000, total=1 << 40)

    monkeypatch.setattr(room.shutil, "disk_usage", little)
    told = room.find_obstacle(tmp_path, states, True)
    assert told.startswith(
        "the last one of Megatron's takes 5 MB, the last outer state 0 B, and 4 MB are free at "
    )
    assert room.find_obstacle(tmp_path, states, False) == ""  # another rank asks the first


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    base = tmp_path / "file" / "0"
    assert room.find_obstacle(base, base / "dsx", True).startswith("Not a directory (")


def test_the_outer_state_needs_space_before_megatron_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 5_000_000)
    states = outer_state(tmp_path, 10, 3_000_000).parent

    def enough_for_one(path: Path) -> Any:
        return SimpleNamespace(free=7_000_000, total=1 << 40)

    monkeypatch.setattr(room.shutil, "disk_usage", enough_for_one)
    told = room.find_obstacle(tmp_path, states, True)
    assert told.startswith(
        "the last one of Megatron's takes 5 MB, the last outer state 3 MB, and 7 MB are free at "
    )
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=9e6, total=1))  # pyright: ignore
    assert room.find_obstacle(tmp_path, states, True) == ""


@needs("megatron")
def test_megatron_is_not_asked_where_it_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = list[int](), list[tuple[str, str]]()

    def original(iteration: int, model: Any, optimizer: Any) -> None:
        asked.append(iteration)

    (tmp_path / "file").write_text("in the way")
    arguments = SimpleNamespace(save=str(tmp_path / "file" / "0"))
    training = SimpleNamespace(save_checkpoint=original)
    monkeypatch.setattr(checkpoint.probe, "training", lambda: training)
    monkeypatch.setattr(checkpoint.probe, "arguments_in_force", lambda: arguments)
    handle = SimpleNamespace(not_saved=lambda path, why: told.append((path.name, why)))
    run: Any = SimpleNamespace(handle=handle, world=SimpleNamespace(rank=0, cluster_id=1))
    checkpoint.patch(run)
    training.save_checkpoint(30, None, SimpleNamespace(dsx=handle))
    assert asked == [] and run.saved_iteration is None
    assert told[0][0] == "iter_0000030" and told[0][1].startswith("iteration 30 is not saved: Not ")


class Saving:
    """A run whose outer state and Megatron's part are saved as they are asked for."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        self.told, self.at_once, self.posted = list[str](), list[str](), list[str]()
        self.training: Any = SimpleNamespace(save_checkpoint=self._megatrons)
        arguments = SimpleNamespace(save=str(directory), **flags)
        place = SimpleNamespace(saving=lambda arguments: nullcontext())
        self._directory, beside = directory, SimpleNamespace(refuse=self.at_once.append)
        beside.settle = lambda: None
        self.of_dsx = _saving_of_dsx(self.told, self.posted)
        self.handle = SimpleNamespace(
            beside=beside, saving=nullcontext, not_saved=self.of_dsx.not_saved,
            keeping=self.of_dsx.keeping,
        )  # fmt: skip
        self.others: list[Any] = []  # what the other ranks have met with
        self.fails: BaseException | None = None
        of_ranks = SimpleNamespace(gather=lambda what, own: [own, *self.others])
        world = SimpleNamespace(rank=0, cluster_id=1, in_cluster=lambda: of_ranks)
        self.run: Any = SimpleNamespace(
            handle=self.handle, world=world, tell=self.told.append,
            division=SimpleNamespace(place=place), saved_iteration=None,
        )  # fmt: skip
        monkeypatch.setattr(checkpoint.probe, "training", lambda: self.training)
        monkeypatch.setattr(checkpoint.probe, "arguments_in_force", lambda: arguments)
        monkeypatch.setattr(checkpoint, "save_outer_state", self._outer)
        self.is_full = False
        checkpoint.patch(self.run)

    def save(self, iteration: int) -> None:
        self.training.save_checkpoint(iteration, None, SimpleNamespace(dsx=self.handle))

    def _outer(self, handle: Any, iteration: int, directory: Path) -> bool:
        if not self.is_full:
            self.of_dsx.saved(outer_state(directory, iteration), iteration)
        return not self.is_full

    def _megatrons(self, iteration: int, model: Any, optimizer: Any) -> None:
        if self.fails is not None:
            (self._directory / tag_of(iteration)).mkdir()
            raise self.fails
        saved(self._directory, iteration, 10)


def _saving_of_dsx(told: list[str], posted: list[str]) -> OfDsx:
    """Return the saving of a first rank; `posted` are the tags that other clusters hear of."""

    def post(kind: str, payload: dict[str, Any]) -> None:
        posted.append(payload["tag"])

    records: Any = SimpleNamespace(saved=lambda path, step: None, deleted=None)
    records.not_saved = lambda path, step, why: told.append(why)
    loop: Any = SimpleNamespace(state=SimpleNamespace(), history=SimpleNamespace(step=0))
    world: Any = SimpleNamespace(rank=0)
    clusters = {"num_clusters": 2}
    checkpoints = {"keep": 1}
    block = {"preset": "diloco", "clusters": clusters, "checkpoints": checkpoints}
    config = load_config({"dsx": block})
    notices: Any = SimpleNamespace(post=post)
    syncs: Any = SimpleNamespace()
    return OfDsx(loop, world, config, records, syncs, notices)


@needs("megatron")
@pytest.mark.parametrize("every", [None, 100])
def test_what_megatron_deletes_at_once_has_its_outer_state_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    saving = Saving(tmp_path, monkeypatch, save_retain_interval=every)
    saving.save(10)
    wanted = ["--save-retain-interval, which deletes the iteration before"] if every else []
    assert saving.at_once == wanted


@needs("megatron")
def test_the_last_save_is_known_to_be_done_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.save(10)
    assert saving.run.saved_iteration == 10
    saving.is_full = True
    saving.save(20)
    assert saving.run.saved_iteration is None


@needs("megatron")
def test_shards_that_megatron_could_not_write_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As core 0.14 and later raise it: on all ranks, and the first one knows why."""
    saving = Saving(tmp_path, monkeypatch)
    saving.save(10)
    full = RuntimeError("Worker failure: [Errno 28] No space left on device: 'x'")
    saving.fails = CheckpointException("write", {1: (full, Any)})
    saving.others = [{"of_disk": [], "others": []}]
    saving.save(20)
    assert saving.told == [
        f"iteration 20 is not saved: rank 1: {full}; what was saved before is as it was, and "
        "training goes on: free some space, or save elsewhere"
    ]
    assert saving.run.saved_iteration is None
    states = tmp_path / "dsx" / "cluster_1"
    assert set(complete_tags(states)) == {"iter_0000010"}
    assert not (tmp_path / "iter_0000020").exists() and latest_iteration(tmp_path) == 10
    assert saving.posted == ["iter_0000010"]  # the others keep what is common
    last = {"step": 10, "path": str(states / "iter_0000010")}
    assert (saving.of_dsx.last, saving.of_dsx.last_complete) == (states / "iter_0000010", last)
    saving.others = [None]  # one rank has not failed, and would go on alone
    with pytest.raises(CheckpointException):
        saving.save(30)
    saving.others = [{"of_disk": [], "others": []}]
    saving.fails = CheckpointException("write", {0: (KeyError("weight"), Any)})
    with pytest.raises(CheckpointException):
        saving.save(40)
    saving.fails, saving.others = None, []
    saving.save(50)
    assert saving.posted == ["iter_0000010", "iter_0000050"]


@needs("megatron")
def test_an_outer_state_that_cannot_be_deleted_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    for iteration in (10, 20):
        outer_state(tmp_path, iteration)
    states = tmp_path / "dsx" / "cluster_1"
    (states / "iter_0000010.removed").write_text("in the way")  # of the rename
    saving.save(30)
    assert saving.told[0].startswith("an old outer state stays: ") and len(saving.told) == 1
    assert set(complete_tags(states)) == {"iter_0000030"}  # what stays does not look complete
    assert not (states / "iter_0000020").exists() and saving.run.saved_iteration == 30


def test_a_part_is_complete_once_megatron_has_named_it(tmp_path: Path) -> None:
    """And what was fetched is placed whole, and named where it is the newest."""
    part = MegatronPart(tmp_path / "0")
    saved(tmp_path / "0", 10, 100)
    (tmp_path / "0" / "iter_0000020").mkdir()
    (tmp_path / "0" / "iter_0000020" / "weights").write_text("a half")
    assert part.is_complete("iter_0000010") and not part.is_complete("iter_0000020")
    with pytest.raises(OSError, match="Megatron's part of iter_0000030 is not there with it"):
        part.place("iter_0000030", tmp_path / "nothing")
    for iteration, latest in ((30, 30), (20, 30)):
        fetched = tmp_path / f"come_{iteration}"
        fetched.mkdir()
        (fetched / "weights").write_text("fetched")
        part.place(f"iter_{iteration:07d}", fetched)
        assert not fetched.exists() and latest_iteration(tmp_path / "0") == latest
        assert (tmp_path / "0" / f"iter_{iteration:07d}" / "weights").read_text() == "fetched"
    assert part.is_complete("iter_0000030.replaced")


def test_what_megatron_was_killed_in_does_not_count_once_the_tracker_is_above_it(
    tmp_path: Path,
) -> None:
    """Noted as a run starts; until Megatron has written it anew."""
    part = MegatronPart(tmp_path)
    saved(tmp_path, 10, 100)
    saved(tmp_path, 20, 100)
    (tmp_path / "iter_0000030").mkdir()
    half = tmp_path / "iter_0000030" / "weights"
    half.write_text("a half")
    own_part.note_not_ended(tmp_path)
    saved(tmp_path, 40, 100)
    own_part.note_not_ended(tmp_path)  # of a later start
    names = [f"iter_{iteration:07d}" for iteration in (10, 20, 30, 40)]
    assert [part.is_complete(name) for name in names] == [True, True, False, True]
    half.write_text("a whole")
    assert part.is_complete("iter_0000030")
    (tmp_path / TRACKER).write_text("20\n")  # by hand, and so below what is whole
    own_part.note_not_ended(tmp_path)
    (tmp_path / TRACKER).write_text("40\n")
    assert part.is_complete("iter_0000040")
    own_part.note_not_ended(tmp_path)
    (tmp_path / TRACKER).write_text("50\n")
    assert part.is_complete("iter_0000040")
    (tmp_path / "iter_0000060").mkdir()
    (tmp_path / f"{own_part.NOT_ENDED}.tmp").mkdir()  # in the way
    own_part.note_not_ended(tmp_path)  # ends no run
    assert not part.is_complete("iter_0000060")


@pytest.mark.parametrize("tracker", [None, "release"])
def test_a_tracker_that_names_no_iteration_says_nothing_of_those_there(
    tmp_path: Path, tracker: str | None
) -> None:
    for iteration in (10, 20):
        saved(tmp_path, iteration, 100)
    (tmp_path / TRACKER).unlink()
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    own_part.note_not_ended(tmp_path)
    (tmp_path / TRACKER).write_text("30\n")
    part = MegatronPart(tmp_path)
    assert part.is_complete("iter_0000010") and part.is_complete("iter_0000020")
