"""What of a Lightning's save is written at once, and how clusters name it, with fakes for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.run.lightning import checkpoints
from tests.run.test_library_deletions import fitting
from tests.run.test_several_lightnings import DDPStrategy, ModelParallelStrategy


class Saving:
    """An agreed save on one rank."""

    def __init__(self, handle: Any, directory: Path, tag: str, *given: Any, **more: Any) -> None:
        self.unfinished = directory / f"{tag}.unfinished"

    has_put_back = False
    part = nullcontext

    def do(self, save: Callable[[], object]) -> None:
        save()

    of_script = do

    def complete(self, finish: Callable[[], None]) -> None:
        """Leave it without its name."""


@pytest.mark.parametrize(
    ("strategy", "is_folder", "is_later"),
    [(DDPStrategy, False, True), (ModelParallelStrategy, False, False),
     (ModelParallelStrategy, True, False)],
)  # fmt: skip
def test_only_a_file_that_one_rank_writes_alone_is_written_beside_training(
    strategy: type, is_folder: bool, is_later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "AgreedSave", Saving)
    monkeypatch.setattr(checkpoints, "gather_objects", lambda value: [value])
    monkeypatch.setattr(checkpoints, "manifest_of", lambda *given: {})
    written, later = list[str](), list[Any]()
    trainer, fit, handle = fitting(
        beside=SimpleNamespace(settle=lambda: None, write=later.append),
        write=lambda *given: None,
        rollback=SimpleNamespace(judge=lambda given: None),
    )  # fmt: skip
    trainer.strategy = strategy()
    trainer.strategy.save_checkpoint = lambda held, place, options: written.append(Path(place).name)
    trainer.strategy.optimizers = []
    trainer.strategy._save_distributed_checkpoint = is_folder
    trainer._checkpoint_connector = SimpleNamespace(dump_checkpoint=lambda only: {"epoch": 0})
    checkpoints._Tag(trainer, fit, tmp_path / "a.ckpt", None).write()
    assert (len(written), len(later), handle.num_begun) == (not is_later, is_later, 1)
    assert written == ([] if is_later else ["a.ckpt.unfinished" if is_folder else "lightning.ckpt"])


@pytest.mark.parametrize("has_put_back", [True, False])
def test_a_file_is_that_of_the_tag_that_was_put_back_before_the_next_is_complete(
    has_put_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "AgreedSave", Saving)
    monkeypatch.setattr(Saving, "has_put_back", has_put_back)
    monkeypatch.setattr(checkpoints, "gather_objects", lambda value: [value])
    monkeypatch.setattr(checkpoints, "manifest_of", lambda *given: {})
    trainer, fit, _ = fitting(
        beside=SimpleNamespace(settle=lambda: None, write=lambda part: None),
        write=lambda *given: None,
        rollback=SimpleNamespace(judge=lambda given: None),
    )  # fmt: skip
    trainer.strategy.optimizers = []
    trainer._checkpoint_connector = SimpleNamespace(dump_checkpoint=lambda only: {"epoch": 0})
    (tmp_path / "a.ckpt.dsx").mkdir()
    (tmp_path / "a.ckpt.dsx" / "lightning.ckpt").write_text("of before")
    (tmp_path / "a.ckpt").write_text("deleted")
    checkpoints._Tag(trainer, fit, tmp_path / "a.ckpt", None).write()
    assert (tmp_path / "a.ckpt").read_text() == ("of before" if has_put_back else "deleted")


def test_a_name_that_is_taken_in_one_cluster_is_taken_in_all() -> None:
    trainer, _, handle = fitting(gather=lambda own: [True, own])
    assert checkpoints._exists(lambda path, of: False, None, "a.ckpt", trainer)
    handle.preemption.is_saving = True  # at a step of this cluster's own
    assert not checkpoints._exists(lambda path, of: False, None, "a.ckpt", trainer)
    handle.preemption.is_saving = False
    handle.gather = lambda own: [False, own]
    assert not checkpoints._exists(lambda path, of: False, None, "a.ckpt", trainer)
