"""What the Trainer, Lightning and Accelerate delete at once, or later, with fakes for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.checkpoint.checksums import MANIFEST
from dsx.config.checkpoints import CheckpointsConfig
from dsx.run.accelerate import saves as of_accelerate
from dsx.run.hugging_face import saves as of_trainer
from dsx.run.lightning import checkpoints as of_lightning
from dsx.run.lightning.fit import Fit, set_fit
from tests.checkpoint.test_tags import write
from tests.run.test_several_lightnings import DDPStrategy, make_fit
from tests.training.test_library_saves import Kept

AT_ONCE: Any = SimpleNamespace(is_later=False)
FIRST: Any = SimpleNamespace(rank=0, cluster_id=0)


def fitting(**handle: Any) -> tuple[Any, Fit, Any]:
    """Return a Trainer of Lightning's, its fit and its handle."""
    fit, kept, trainer = make_fit(), Kept(), SimpleNamespace(strategy=DDPStrategy())
    vars(kept).update(handle)
    trainer.is_global_zero = True
    fit.handle = kept  # type: ignore[assignment]
    set_fit(trainer, fit)
    return trainer, fit, kept


def of_a_trainer(base: Path) -> Path:
    old = base / "checkpoint-2"
    trainer: Any = SimpleNamespace(args=SimpleNamespace(should_save=True, save_total_limit=1))
    scope: dict[str, Any] = {"shutil": shutil, "old": old}
    exec("def rotate(): shutil.rmtree(old)", scope)
    trainer._rotate_checkpoints = scope["rotate"]
    write(base / "checkpoint-4", 0, 4)
    saves = of_trainer.Saves(SimpleNamespace(), trainer, Kept(), FIRST)  # type: ignore[arg-type]
    saves.serve(AT_ONCE)
    (old / MANIFEST).mkdir(parents=True)  # is not deleted as a file is
    saves.save(base / "checkpoint-4", lambda: trainer._rotate_checkpoints())
    return old


def of_an_accelerator(base: Path) -> Path:
    old = base / "checkpoint_0" / "cluster_0"
    for number in range(2):
        (base / f"checkpoint_{number}" / "cluster_0").mkdir(parents=True)
    (old / MANIFEST).mkdir()
    saves = of_accelerate.Saves(Kept(), FIRST, AT_ONCE)  # type: ignore[arg-type]
    saves.delete_older(base / "checkpoint_1", 1, is_saved=True)
    return old


def of_lightnings(base: Path) -> Path:
    trainer, *_ = fitting()
    callback = SimpleNamespace(save_weights_only=False)
    old = base / "a.ckpt.dsx"
    (old / MANIFEST).mkdir(parents=True)
    of_lightning._remove(lambda *given: None, callback, trainer, str(base / "a.ckpt"))
    return old


@pytest.mark.parametrize("of", [of_a_trainer, of_an_accelerator, of_lightnings])
def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(
    of: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert of(tmp_path).is_dir()
    (record,) = [one for one in caplog.records if "old checkpoint" in one.message]
    assert record.message.startswith("an old checkpoint stays: [Errno 21]")


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_lightning_keeps_of_weights_alone_goes_at_once_though_saves_are_later(
    weights_only: bool, tmp_path: Path
) -> None:
    trainer, fit, handle = fitting(averaged=nullcontext)
    fit.checkpoints = CheckpointsConfig(beside_training=True)
    fit.is_saved = False  # what another callback has saved before
    trainer.strategy.broadcast = lambda path: path
    if weights_only:
        of_lightning._save(lambda *given: None, trainer, tmp_path / "b.ckpt", weights_only=True)
    callback, gone = SimpleNamespace(save_weights_only=weights_only), list[str]()
    path = str(tmp_path / "a.ckpt")
    of_lightning._remove(lambda of, path: gone.append(path), callback, trainer, path)
    assert gone == ([path] if weights_only else [])
    assert handle.waiting == ([] if weights_only else [tmp_path / "a.ckpt.dsx"])


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_that_one_cluster_cannot_place_is_taken_by_none(
    is_own: bool, tmp_path: Path
) -> None:
    if is_own:
        (tmp_path / ".dsx_fetched").touch()  # in the way
    others = "" if is_own else "No space left on device (x)"
    handle: Any = SimpleNamespace(gather=lambda own: [own, others])
    said = r"^cluster 0: Not a directory \(/.*\)$" if is_own else r"^cluster 1: No space left .*x\)"
    with pytest.raises(ValueError, match=said):
        of_accelerate._fetch(handle, FIRST, tmp_path, "checkpoint_1")
    assert [*tmp_path.iterdir()] == ([tmp_path / ".dsx_fetched"] if is_own else [])
