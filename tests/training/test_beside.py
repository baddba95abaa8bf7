"""What a save beside training waits for, and for how long; where there is no memory for it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.checkpoint import snapshot as snapshots
from dsx.checkpoint.snapshot import Snapshot
from dsx.comm.in_cluster import InCluster
from dsx.training import beside as module
from dsx.training.beside import Beside

MOST_SECONDS = 0.3


class Told:
    """One rank's saves, and what it was told of them."""

    def __init__(self, is_wanted: bool | None, copied: int = 0) -> None:
        store: Any = None
        ranks = InCluster(0, 0, 1, store, 1.0, 1.0)
        world: Any = SimpleNamespace(
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
            world,
            is_wanted,
            lambda: copied,
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


@pytest.mark.parametrize(
    ("is_wanted", "goes_beside"), [(None, False), (True, True), (False, False)]
)
def test_it_needs_memory_for_the_copies(
    is_wanted: bool | None, goes_beside: bool, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(module, "free_on_host", lambda: 10 << 20)
    told = Told(is_wanted, copied=6 << 20)
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            assert told.save(tmp_path / f"{step}", step) == goes_beside
    warned = [text for text in caplog.messages if "saves hold training up" in text]
    assert len(warned) == (is_wanted is None)
    assert all("6.29 MB on this host, of which 10.5 MB are free" in text for text in warned)
    told.beside.close()
    assert told.saved == ([("step3", 3), ("step4", 4)] if goes_beside else [])
