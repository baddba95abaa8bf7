"""Saves of the Trainer, Lightning and Accelerate beside training, their copies, and back from them.

Unmodified scripts, trained to the end, then killed in the midst of a save that is written beside
training, and started anew on an empty disk: the same bits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsx.checkpoint.checksums import MANIFEST
from dsx.checkpoint.tags import complete_tags
from dsx.telemetry.run_folder import read_about
from tests.installed import needs
from tests.run.saving_clients import (
    KINDS,
    ONE_FOLDER,
    common_steps,
    kill_in_a_save,
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


@needs(*ONE_FOLDER.needs)
def test_killed_twice_between_the_parts_of_one_folder_and_gone_on(tmp_path: Path) -> None:
    """Accelerate's part is new there each time, and DeepSpeed's of before."""
    write_configs(ONE_FOLDER, tmp_path, None)
    train(ONE_FOLDER, tmp_path)
    whole = models(ONE_FOLDER, tmp_path)
    shutil.rmtree(tmp_path / "runs")
    for resume in ((), ONE_FOLDER.resume, ONE_FOLDER.resume):
        kill_in_a_save(ONE_FOLDER, tmp_path, None, *resume, clusters=(0, 1))
        for m in range(2):
            held = complete_tags(tmp_path / "runs" / "last" / f"cluster_{m}")
            steps = {tag: manifest["step"] for tag, manifest in held.items()}
            assert steps == {"accelerate": 16, "accelerate.replaced": 8, "pytorch_model": 8}
    output = train(ONE_FOLDER, tmp_path, *ONE_FOLDER.resume)
    assert "that of step 8, which it was to replace, is loaded" in output
    assert models(ONE_FOLDER, tmp_path) == whole
