"""Checkpoints of a library: what it deletes waits, and folders around tags of dsx's are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsx
from dsx.checkpoint.checksums import MANIFEST, find_damage
from dsx.checkpoint.diverged import mark_diverged
from dsx.checkpoint.places import by_tag
from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import complete_tags
from dsx.run.hugging_face import saves
from dsx.run.lightning.own_file import OwnFile, copied
from dsx.training.whole import Whole, find_inner_damage, unmark
from tests.checkpoint.test_tags import chosen, write
from tests.distributed import run_distributed
from tests.telemetry.trace.runs import block
from tests.tiny import TinyNet, batch
from tests.training.test_copying import Clusters, allow, guarded

__all__ = ["guarded"]


def delete_later(clusters: Clusters, *steps: int) -> None:
    """Let a library ask, behind its last save, that those of some steps go, by relative paths."""
    for m, keeping in enumerate(clusters.all):
        for step in steps:
            tag = clusters.base / f"cluster_{m}" / f"step{step}"
            keeping.put_off(Path(os.path.relpath(tag)), partial(shutil.rmtree, tag))


def begin(clusters: Clusters) -> None:
    for keeping in clusters.all:
        keeping.serve_library()
        keeping.begin()


def held(clusters: Clusters, cluster: int) -> set[str]:
    keeping = clusters.all[cluster]
    if keeping._thread is not None:
        keeping._thread.join(20)
    return {*complete_tags(clusters.base / f"cluster_{cluster}")}


def saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clusters:
    """All have saved step 2, whose copy has begun and waits, and delete it in the next save."""
    monkeypatch.chdir(tmp_path)
    clusters = Clusters(tmp_path)
    begin(clusters)
    clusters.save(2)
    clusters.pass_boundary()
    begin(clusters)
    delete_later(clusters, 2)
    return clusters


def test_what_a_library_deletes_waits_for_all_clusters_and_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = saved_again(tmp_path, monkeypatch)
    clusters.save(4)
    assert held(clusters, 0) == {"step2", "step4"}  # nobody knows yet that all hold it
    clusters.pass_boundary()
    assert held(clusters, 0) == {"step2", "step4"}  # as it is being copied
    allow(0, 1)
    clusters.pass_until(("copied", 0, 4), ("copied", 1, 4))
    clusters.pass_boundary()
    begin(clusters)
    delete_later(clusters, 4)
    clusters.save(6)
    clusters.pass_boundary()
    assert held(clusters, 0) == held(clusters, 1) == {"step6"}
    clusters.pass_until(("copied", 0, 6), ("copied", 1, 6))
    for _ in range(2):
        clusters.pass_boundary()
    clusters.close()
    assert clusters.there == [["step6"]] * 2  # as on the disk


def test_where_one_cluster_has_not_saved_all_keep_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = saved_again(tmp_path, monkeypatch)
    write(tmp_path, 0, 4)
    clusters.all[0].saved(tmp_path / "cluster_0" / "step4", 4)
    clusters.pass_boundary()
    told = [[True, False], [True, True]]
    clusters.all[0].end_of_library(lambda value: told[0])  # as it ends there
    assert "step2" in held(clusters, 0) and "step2" in held(clusters, 1)
    allow(0, 1)
    clusters.pass_until(("copied", 0, 2), ("copied", 1, 2))
    for keeping in clusters.all:
        keeping.end_of_library(lambda value: told[1])
    clusters.close()
    assert held(clusters, 0) == {"step4"} and held(clusters, 1) == set()


def test_a_folder_is_whole_once_its_tags_and_the_librarys_files_are(tmp_path: Path) -> None:
    folder, seen = tmp_path / "checkpoint_3" / "cluster_1", list[Any]()
    whole = Whole(
        True,
        lambda at: seen.append(("prepared", at)),
        lambda at, step: seen.append((step, at)),
        lambda at, why: seen.append(why),
    )
    for name in ("accelerate", "pytorch_model"):
        write(tmp_path / "made", 1, 6)
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / "cluster_1" / "step6").rename(folder / name)
    (folder / "notes.txt").write_text("the library's")
    (folder / "accelerate.replaced").mkdir()
    (folder / "accelerate.replaced" / "old.bin").write_text("of before")
    whole.begin(folder, 2)
    whole.entered(folder / "accelerate")
    whole.written()
    whole.entered(tmp_path / "elsewhere" / "pytorch_model")
    assert not seen and not (folder / MANIFEST).exists()
    whole.entered(folder / "pytorch_model")
    assert seen == [("prepared", folder), (6, folder)]
    assert find_damage(folder) is None and find_inner_damage(folder, 0, 1) is None
    remote = Remote(f"file://{tmp_path}/far", "here")
    remote.lies = by_tag
    remote.copy(folder)
    far = tmp_path / "far" / "cluster_1" / "checkpoint_3"
    assert remote.tags(1)["checkpoint_3"]["step"] == 6 and find_damage(far) is None
    assert (far / "notes.txt").is_file() and not (far / "accelerate.replaced").exists()
    (folder / "notes.txt").write_text("changed")
    assert "notes.txt holds 7 bytes" in str(find_damage(folder))
    (folder / "notes.txt").write_text("the library's")
    whole.entered(folder / "accelerate")  # once more, finished
    assert len(seen) == 4 and find_damage(folder) is None
    (folder / "dsx.json.tmp").mkdir()  # in the way
    whole.entered(folder / "accelerate")
    assert "gets no manifest of its own ([Errno 21] Is a dir" in seen[-1]
    assert not (folder / MANIFEST).exists()
    (folder / "dsx.json.tmp").rmdir()
    whole.begin(folder, 2)
    assert not (folder / MANIFEST).exists()  # until it is whole again
    unmark(folder)
    assert not [*folder.rglob(MANIFEST)]


def test_what_lightning_writes_beside_training_is_of_the_moment_of_the_save() -> None:
    weight, seen = torch.ones(3), list[Any]()
    state = {"weight": weight, "tied": weight.view(3), "steps": [torch.zeros(1), {"n": 1}]}
    part = OwnFile(state, seen.append, is_writer=True)
    part.detach()
    weight.zero_()
    state["steps"][1]["n"] = 2
    part.write()
    (held,) = seen
    assert held["weight"].tolist() == [1, 1, 1] and held["steps"][1] == {"n": 1}
    assert held["weight"].data_ptr() == held["tied"].data_ptr()  # as in the model
    OwnFile(state, seen.append, is_writer=True).write()
    assert seen[1] is state  # at once: nothing is copied
    module = torch.nn.Linear(2, 2).state_dict()
    assert copied(module)._metadata == module._metadata == {"": {"version": 1}}  # type: ignore[attr-defined]
    other = OwnFile(state, seen.append, is_writer=False)
    other.detach()
    other.write()
    assert seen[2] == {}


def train_where_one_cluster_saves(base: str) -> int:
    config = block("diloco", dir=f"{base}/run")
    world = dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    if world.cluster_id == 1:
        handle.keeping.serve_library()
    for step in range(1, 4):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
    handle.finish()
    handle.close()
    return handle.step


@pytest.mark.ci
def test_a_cluster_that_has_saved_nothing_comes_to_the_end_with_the_others(tmp_path: Path) -> None:
    assert run_distributed(train_where_one_cluster_saves, 2, str(tmp_path)) == [3, 3]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_run_killed_twice_in_saves_of_one_name_has_what_all_have_loaded(
    is_loaded: bool, tmp_path: Path
) -> None:
    """Cluster 0 has saved `last` each time, cluster 1 never since step 4."""
    clusters = Clusters(tmp_path)
    own, keeping = tmp_path / "cluster_0", clusters.all[0]
    for cluster, step in ((0, 4), (1, 4), (0, 8)):
        write(tmp_path, cluster, step, tag="last")
    assert chosen(tmp_path, "last") == [(0, "last.replaced"), (1, "last")]
    if is_loaded:
        keeping.loaded(own / "last.replaced", 4)
    keeping.make_way(own, "last", 8)  # as each save begins
    steps = {tag: told["step"] for tag, told in complete_tags(own).items()}
    assert steps == ({"last": 4} if is_loaded else {"last": 8, "last.held.replaced": 4})
    write(tmp_path, 0, 8, tag="last")
    if is_loaded:
        assert chosen(tmp_path, "last") == [(0, "last.replaced"), (1, "last")]
        write(tmp_path, 1, 8, tag="last")
        assert chosen(tmp_path, "last") == [(0, "last"), (1, "last")]
        keeping.make_way(own, "last", 12)
        assert complete_tags(own)["last"]["step"] == 8


def test_what_is_saved_again_behind_a_load_waits_for_all_clusters_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clusters = Clusters(tmp_path)
    allow(0, 1)
    for step in (8, 12):
        begin(clusters)
        clusters.save(step)
        clusters.pass_until(("copied", 0, step), ("copied", 1, step))
        clusters.pass_boundary()
    for m, keeping in enumerate(clusters.all):
        keeping.loaded(tmp_path / f"cluster_{m}" / "step8", 8)
    begin(clusters)
    delete_later(clusters, 8)
    write(tmp_path, 0, 12)
    clusters.all[0].saved(tmp_path / "cluster_0" / "step12", 12)
    clusters.pass_boundary()
    assert "step8" in held(clusters, 0)
    write(tmp_path, 1, 12)
    clusters.all[1].saved(tmp_path / "cluster_1" / "step12", 12)
    clusters.pass_boundary()
    clusters.close()
    assert "step8" not in held(clusters, 0) | held(clusters, 1)


@pytest.mark.parametrize("what", ["gone back", "gone back, told late", "loaded again"])
def test_what_is_put_back_is_what_all_clusters_have_loaded_last(what: str, tmp_path: Path) -> None:
    """In one process `last` is loaded, or common, and what it was before, or the other way."""
    clusters = Clusters(tmp_path)
    own, keeping = tmp_path / "cluster_0", clusters.all[0]
    for cluster in range(2):
        write(tmp_path, cluster, 4, tag="last")
    keeping.loaded(own / "last", 4)
    for cluster in range(2):
        write(tmp_path, cluster, 8, tag="last")
        clusters.all[cluster].saved(tmp_path / f"cluster_{cluster}" / "last", 8)
    if what != "gone back, told late":
        clusters.pass_boundary()
    for cluster in range(2):
        mark_diverged(tmp_path / f"cluster_{cluster}", 7, "a")
    keeping.loaded(own / "last.replaced", 4)
    clusters.pass_boundary()
    if what == "loaded again":
        keeping.loaded(own / "last", 8)
    keeping.make_way(own, "last", 12 if what == "loaded again" else 6)
    steps = {tag: told["step"] for tag, told in complete_tags(own).items()}
    assert steps == ({"last": 8, "last.replaced": 4} if what == "loaded again" else {"last": 4})
    if what != "loaded again":
        write(tmp_path, 0, 6, tag="last")  # and cluster 1 is killed before
        assert chosen(tmp_path, None) == [(0, "last.replaced"), (1, "last.replaced")]
    allow(0, 1)
    clusters.close()


@pytest.mark.parametrize("loaded", ["{}/cluster_0", "cluster_0", "cluster_1/../cluster_0", "link"])
def test_what_was_loaded_is_put_back_where_one_folder_has_two_names(
    loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for cluster, step in ((0, 4), (1, 4), (0, 8)):
        write(tmp_path, cluster, step, tag="last")
    (tmp_path / "link").symlink_to("cluster_0")
    clusters = Clusters(tmp_path)
    clusters.all[0].loaded(Path(loaded.format(tmp_path)) / "last.replaced", 4)
    clusters.all[0].make_way(Path("cluster_0"), "last", 8)
    write(tmp_path, 0, 8, tag="last")
    assert chosen(tmp_path, "last") == [(0, "last.replaced"), (1, "last")]
    clusters.close()


class Kept:
    """A handle of one rank whose deletions wait."""

    cluster_id, num_begun = 0, 0

    def __init__(self) -> None:
        self.waiting = list[Path]()
        self.beside: Any = SimpleNamespace(settle=lambda: None)
        self.keeping: Any = self
        self.preemption = SimpleNamespace(is_saving=False)
        self.rollback: Any = SimpleNamespace(saved_whole=lambda folder, step: None)
        self.not_saved: Any = None

    def begin(self) -> None:
        self.num_begun += 1

    def serve_library(self, whole: Whole) -> None:
        """Take that deletions wait."""

    def put_off(self, path: Path, delete: Callable[[], object]) -> None:
        self.waiting.append(path)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize("is_later", [True, False])
@pytest.mark.parametrize("is_method", [True, False])
def test_what_a_trainer_deletes_is_noted_and_deletes_what_is_complete_last(
    is_later: bool, is_method: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {"shutil": shutil, "old": tmp_path / "checkpoint-2"}
    exec("def rotate(*args, **how): shutil.rmtree(old, ignore_errors=True)", scope)
    args = SimpleNamespace(should_save=True, save_total_limit=1)
    trainer: Any = SimpleNamespace(args=args)
    module: Any = SimpleNamespace()
    owner, name = (trainer, "_rotate_checkpoints") if is_method else (module, "rotate_checkpoints")
    setattr(owner, name, scope["rotate"])
    handle: Any = Kept()
    monkeypatch.setattr(saves, "gather_objects", lambda value: [value])
    for step in (2, 4):
        write(tmp_path / f"checkpoint-{step}", 0, step)
    world: Any = SimpleNamespace(rank=0)
    one = saves.Saves(module, trainer, handle, world)
    one.serve(SimpleNamespace(is_later=is_later))  # type: ignore[arg-type]
    one.save(tmp_path / "checkpoint-4", lambda: getattr(owner, name)(use_mtime=True))
    assert getattr(owner, name) is scope["rotate"] and scope["shutil"] is shutil
    assert handle.num_begun == 1
    if is_later:
        assert handle.waiting == [tmp_path / "checkpoint-2"]
        assert (tmp_path / "checkpoint-2").is_dir()
    else:
        assert not (tmp_path / "checkpoint-2").exists() and not handle.waiting
