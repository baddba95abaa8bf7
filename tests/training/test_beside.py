"""What a save beside training waits for, and for how long, and who saves at once."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsx.checkpoint import snapshot as snapshots
from dsx.checkpoint.snapshot import Snapshot
from dsx.comm.in_cluster import InCluster
from dsx.core.transport import PeerLost
from dsx.run.lightning.own_file import OwnFile
from dsx.training.beside import Beside

MOST_SECONDS = 0.3


class Told:
    """One rank's saves, and what it was told of them."""

    def __init__(self, is_wanted: bool) -> None:
        store: Any = None
        ranks = InCluster(0, 0, 1, store, 1.0, 1.0)
        self.world: Any = SimpleNamespace(
            num_handles=1,
            cluster_id=0,
            rank=0,
            world_size=1,
            in_cluster_seconds=MOST_SECONDS,
            in_cluster=lambda: ranks,
            connect_own_store=lambda name: store,
        )
        self.saved: list[tuple[str, int]] = []
        self.failed: list[tuple[str, str, int]] = []
        self.beside = Beside(
            self.world,
            is_wanted,
            lambda path, step: self.saved.append((path.name, step)),
            lambda path, why, step: self.failed.append((path.name, why, step)),
        )

    def save(self, folder: Path, step: int) -> bool:
        """Save as an engine does; return whether it goes on beside."""
        self.beside.wait()
        self.beside.open(may_be_later=True)
        unfinished = folder / "a.unfinished"
        state = Snapshot(unfinished / "x.safetensors", {"a": torch.ones(3)}, {}, {}, tells=False)
        self.beside.write(state)

        def finish() -> None:
            unfinished.rename(folder / f"step{step}")

        return self.beside.begin(folder / f"step{step}", unfinished, step, finish)


def test_one_at_a_time_and_a_disk_that_hangs_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    told, goes_on, write_all = Told(True), threading.Event(), snapshots._write_all

    def hang(descriptor: int, chunk: Any) -> None:
        goes_on.wait(30)
        write_all(descriptor, chunk)

    monkeypatch.setattr(snapshots, "_write_all", hang)
    assert told.save(tmp_path, 3)
    told.beside.pass_boundary()
    with pytest.raises(TimeoutError, match=r"step3 has been written for .* look at that disk"):
        told.save(tmp_path, 4)
    assert not told.saved and not told.failed
    told.world.in_cluster_seconds = 60.0  # however busy this host is
    goes_on.set()
    assert told.save(tmp_path, 5)  # behind the one before
    told.beside.close()
    assert told.saved == [("step3", 3), ("step5", 5)] and not told.failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step3", "step5"]


def test_what_cannot_be_named_is_not_saved(tmp_path: Path) -> None:
    told = Told(True)
    (tmp_path / "step3").mkdir()
    (tmp_path / "step3" / "other").touch()  # not empty: nothing can be renamed to it
    assert told.save(tmp_path, 3)
    told.beside.close()
    ((name, why, step),) = told.failed
    assert (name, step) == ("step3", 3) and "Directory not empty" in why
    assert not (tmp_path / "a.unfinished").exists() and not told.saved


def test_what_is_being_written_stays_as_it_was_though_the_next_save_gives_up(
    tmp_path: Path, monkeypatch: Any
) -> None:
    told, goes_on, write_all = Told(True), threading.Event(), snapshots._write_all

    def hang(descriptor: int, chunk: Any) -> None:
        goes_on.wait(30)
        write_all(descriptor, chunk)

    monkeypatch.setattr(snapshots, "_write_all", hang)
    anchor = torch.zeros(3)
    told.beside.open(may_be_later=True)
    path = tmp_path / "a.unfinished" / "x.safetensors"
    told.beside.write(Snapshot(path, {"a": anchor}, {}, {"a": 0}, tells=False))
    finish = partial((tmp_path / "a.unfinished").rename, tmp_path / "step3")
    assert told.beside.begin(tmp_path / "step3", path.parent, 3, finish)
    with pytest.raises(TimeoutError):
        told.beside.wait()
    told.beside.open(may_be_later=True)  # as every rank does that is to agree on the next save
    told.beside.drop()
    told.beside.release(0)
    anchor.fill_(7.0)
    goes_on.set()
    told.beside.close()
    assert told.saved == [("step3", 3)]
    assert load_file(tmp_path / "step3" / "x.safetensors")["a"].tolist() == [0.0, 0.0, 0.0]


def test_what_is_wrong_in_any_way_is_told_to_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(descriptor: int, chunk: Any) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(snapshots, "_write_all", fail)
    told = Told(True)
    assert told.save(tmp_path, 3)
    told.beside.wait_together()
    assert "MemoryError: no room for a copy" in told.failed[0][1]


def test_ranks_that_have_lost_touch_save_at_once_from_then_on(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    told = Told(True)

    def lost(what: str, value: Any) -> Any:
        raise PeerLost("the others do not answer")

    monkeypatch.setattr(InCluster, "gather", lambda self, what, value: lost(what, value))
    assert told.save(tmp_path, 3)
    told.beside.close()
    assert "PeerLost: the others do not answer" in told.failed[0][1]
    with caplog.at_level(logging.WARNING):
        assert not told.save(tmp_path / "4", 4) and not told.save(tmp_path / "5", 5)
    assert len([text for text in caplog.messages if "its saves are written at once" in text]) == 1


def test_what_cannot_be_copied_is_told_to_the_other_ranks_as_what_cannot_be_written() -> None:
    told = Told(True)
    told.beside.open(may_be_later=True)
    part = OwnFile({"of a callback": threading.Lock()}, lambda held: None, is_writer=True)
    with pytest.raises(OSError, match="no copy for a save beside training: TypeError"):
        told.beside.write(part)
    assert told.beside._part == []


@pytest.mark.parametrize("is_wanted", [True, False])
def test_several_engines_and_who_deletes_what_is_older_save_at_once(
    is_wanted: bool, tmp_path: Path, caplog: Any
) -> None:
    told = Told(is_wanted)
    told.world.num_handles = 2
    with caplog.at_level(logging.WARNING):
        assert not told.save(tmp_path / "3", 3)
    assert ("not for several engines in one script" in caplog.text) == is_wanted
    told = Told(is_wanted)
    with caplog.at_level(logging.WARNING):
        told.beside.refuse("Lightning")
    assert ("not for Lightning: its saves are written at once" in caplog.text) == is_wanted
    assert not told.save(tmp_path / "4", 4)
    assert (tmp_path / "4" / "a.unfinished" / "x.safetensors").exists()
