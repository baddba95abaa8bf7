"""Saves of the Trainer, Lightning and Accelerate beside training, their copies, and back from them.

Unmodified scripts, trained to the end, then killed in the midst of a save that is written beside
training, and started anew on an empty disk: the same bits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.checksums import MANIFEST
from dsx.checkpoint.tags import complete_tags
from dsx.telemetry.run_folder import read_about
from tests.installed import needs
from tests.run.launching import run
from tests.run.saving_clients import (
    KINDS,
    OF_TWO_CLUSTERS,
    ONE_FOLDER,
    common_steps,
    kill_in_a_save,
    launch,
    models,
    require_whole,
    train,
    write_configs,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*kind.needs)) for name, kind in KINDS.items()]
)
def test_killed_in_a_save_beside_training_and_gone_on_from_copies(
    name: str, tmp_path: Path
) -> None:
    kind, url, far = KINDS[name], f"file://{tmp_path}/far", tmp_path / "far"
    write_configs(kind, tmp_path, url)
    train(kind, tmp_path)
    whole = models(kind, tmp_path)
    assert whole[0] == whole[1]
    require_whole(tmp_path)
    assert kind.last in common_steps(url)  # its end waits for the last copy
    kept = {path.relative_to(tmp_path) for path in tmp_path.glob(kind.kept)}
    assert len(kept) == kind.num_kept, kept  # what was put off is deleted as it ends
    for about in read_about(tmp_path / "record").values():
        assert any("copied_to" in entry for entry in about["checkpoints"]), about
    for place in ("runs", "far", "record"):
        shutil.rmtree(tmp_path / place)

    step = kill_in_a_save(kind, tmp_path, url)
    assert 0 < step < kind.last
    cut = [path for path in (tmp_path / "runs").rglob("*") if kind.killed_in in path.name]
    assert cut and not any((path / MANIFEST).exists() for path in cut)
    require_whole(tmp_path)
    shutil.rmtree(tmp_path / "runs")  # a new machine
    output = train(kind, tmp_path, *(str(part).format(step=step) for part in kind.resume))
    assert f"{far}/cluster_0/" in output and "is fetched" in output
    assert models(kind, tmp_path) == whole
    require_whole(tmp_path)
    left = {path.relative_to(tmp_path) for path in tmp_path.glob(kind.kept)}
    if name.startswith("trainer"):
        assert left == kept


def steps_below(folder: Path) -> dict[str, int]:
    """Return the step of each tag that is complete there."""
    return {tag: manifest["step"] for tag, manifest in complete_tags(folder).items()}


@needs(*ONE_FOLDER.needs)
def test_killed_twice_between_the_parts_of_one_folder_and_gone_on(tmp_path: Path) -> None:
    """Accelerate's part is new there each time, and DeepSpeed's of before."""
    write_configs(ONE_FOLDER, tmp_path, None)
    train(ONE_FOLDER, tmp_path)
    whole = models(ONE_FOLDER, tmp_path)
    shutil.rmtree(tmp_path / "runs")

    def is_reached(log: str) -> bool:
        return all(f"cluster_{m}/pytorch_model.unfinished" in log for m in range(2))

    for resume in ((), ONE_FOLDER.resume, ONE_FOLDER.resume):
        kill_in_a_save(ONE_FOLDER, tmp_path, None, *resume, is_reached=is_reached)
        for m in range(2):
            steps = steps_below(tmp_path / "runs" / "last" / f"cluster_{m}")
            assert steps == {"accelerate": 16, "accelerate.replaced": 8, "pytorch_model": 8}
    output = train(ONE_FOLDER, tmp_path, *ONE_FOLDER.resume)
    assert "that of step 8, which it was to replace, is loaded" in output
    assert models(ONE_FOLDER, tmp_path) == whole


@needs(*OF_TWO_CLUSTERS.needs)
def test_killed_twice_where_one_cluster_has_saved_and_hidden_by_another_runs_folder(
    tmp_path: Path,
) -> None:
    kind, url, folder = OF_TWO_CLUSTERS, f"file://{tmp_path}/far", tmp_path / "runs" / "last"
    write_configs(kind, tmp_path, url)
    train(kind, tmp_path)
    whole = models(kind, tmp_path)
    (tmp_path / "runs").rename(tmp_path / "other")
    shutil.rmtree(tmp_path / "far")
    newest = folder / "cluster_0" / "accelerate" / MANIFEST
    calm = ("--step_seconds", 0.4)  # what is copied is not written again meanwhile
    for resume in ((), kind.resume, kind.resume):
        known = newest.stat().st_mtime_ns if resume else 0

        def is_reached(log: str, known: int = known) -> bool:
            is_new = newest.is_file() and newest.stat().st_mtime_ns != known
            return is_new and steps_below(newest.parents[1])["accelerate"] == 32

        told = kill_in_a_save(kind, tmp_path, url, *resume, *calm, is_reached=is_reached)
        assert told == 16
        ahead = {"accelerate": 32, "accelerate.replaced": 16}
        assert steps_below(folder / "cluster_0") == ahead
        assert steps_below(folder / "cluster_1") == {"accelerate": 16}
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "other" / "last" / "cluster_0", folder / "cluster_0")
    ((status, output),) = run(launch(kind, tmp_path, *kind.resume), at=tmp_path)
    assert status != 0
    assert "all clusters have it as of step 16: to load that, move runs/last away" in output
    folder.rename(tmp_path / "away")
    train(kind, tmp_path, *kind.resume)
    assert models(kind, tmp_path) == whole


@needs(*KINDS["lightning"].needs)
def test_a_file_of_lightnings_is_written_beside_training_as_it_is_at_once(tmp_path: Path) -> None:
    """With what a state dict says of its modules; under a name that all clusters have free."""
    kind, found = KINDS["lightning"], list[Any]()
    for is_beside in (False, True):
        write_configs(kind, tmp_path, None, is_beside)
        taken = tmp_path / "runs" / "ck" / "cluster_1" / "epoch=0-step=4.ckpt"
        taken.parent.mkdir(parents=True)
        taken.write_text("of another run")
        train(kind, tmp_path, "--top_k", -1)
        assert taken.read_text() == "of another run"
        ways = [torch.load(path, weights_only=False) for path in files_of(tmp_path)]
        assert [one["global_step"] for one in ways] == [2, 4, 6, 8, 8] * 2
        found.append(ways)
        shutil.rmtree(tmp_path / "runs")
    for at_once, beside in zip(*found, strict=True):
        of_modules = beside["state_dict"]._metadata
        assert of_modules["first"] == {"version": 1}
        assert of_modules == at_once["state_dict"]._metadata
        require_equal(at_once, beside)


def files_of(at: Path) -> list[Path]:
    """Return the checkpoints of both clusters; what one cluster's disk has is taken in both."""
    names = [f"epoch=0-step={step}.ckpt" for step in (2, "4-v1", 6, 8)]
    return [
        at / "runs" / "ck" / f"cluster_{m}" / name
        for m in range(2)
        for name in (*names, "last.ckpt")
    ]


def require_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [*one] == [*other]
        for name, value in one.items():
            require_equal(value, other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            require_equal(first, second)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@needs(*KINDS["lightning"].needs)
def test_of_weights_alone_lightning_keeps_the_last_one(tmp_path: Path) -> None:
    """They are written, and deleted, at once; no run goes on from them."""
    kind = KINDS["lightning"]
    write_configs(kind, tmp_path, None)
    train(kind, tmp_path, "--weights_only")
    for m in range(2):
        left = [path.name for path in (tmp_path / "runs" / "ck" / f"cluster_{m}").iterdir()]
        assert left == ["epoch=0-step=8.ckpt"]
