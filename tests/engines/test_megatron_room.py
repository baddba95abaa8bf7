"""What keeps Megatron from saving is seen before it begins, and ends no run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.engines.megatron.own_part import MegatronPart, latest_iteration
from megatron_patches import checkpoint, room
from tests.installed import needs

TRACKER = "latest_checkpointed_iteration.txt"


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


def test_a_disk_with_less_space_than_the_last_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert room.find_obstacle(tmp_path / "new", True) == ""
    saved(tmp_path, 10, 5_000_000)
    assert room.find_obstacle(tmp_path, True) == ""
    assert [path.name for path in tmp_path.glob("*.tmp")] == []

    def little(path: Path) -> Any:
        return SimpleNamespace(free=4_000_000)

    monkeypatch.setattr(room.shutil, "disk_usage", little)
    told = room.find_obstacle(tmp_path, True)
    assert told.startswith("the last one of Megatron's takes 5 MB, and 4 MB are free at ")
    assert room.find_obstacle(tmp_path, False) == ""  # another rank asks the first


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert room.find_obstacle(tmp_path / "file" / "0", True).startswith("Not a directory (")


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
    assert asked == []
    assert told[0][0] == "iter_0000030" and told[0][1].startswith("iteration 30 is not saved: Not ")


def test_a_part_is_complete_once_megatron_has_named_it(tmp_path: Path) -> None:
    """And what was fetched is placed whole, and named where it is the newest."""
    part = MegatronPart(tmp_path / "0")
    saved(tmp_path / "0", 10, 100)
    (tmp_path / "0" / "iter_0000020").mkdir()
    assert part.is_complete("iter_0000010") and not part.is_complete("iter_0000020")
    with pytest.raises(OSError, match="Megatron's part of iter_0000030 is not there with it"):
        part.place("iter_0000030", tmp_path / "nothing")
    for iteration, latest in ((30, 30), (20, 30)):
        fetched = tmp_path / f"come_{iteration}"
        fetched.mkdir()
        (fetched / "weights").write_text("fetched")
        part.place(f"iter_{iteration:07d}", fetched)
        if iteration == 20:  # older than what is named: it may be a half of Megatron's
            assert fetched.is_dir()
            continue
        assert not fetched.exists() and latest_iteration(tmp_path / "0") == latest
        assert (tmp_path / "0" / f"iter_{iteration:07d}" / "weights").read_text() == "fetched"
    assert part.is_complete("iter_0000030.replaced")
