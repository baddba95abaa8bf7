"""What a path on the command line means: a run's folder, a directory of checkpoints, or one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsx.checkpoint.of_run import Saved, find_saved


def save(base: Path, tag: str = "a") -> Path:
    for cluster in range(2):
        directory = base / f"cluster_{cluster}" / tag
        directory.mkdir(parents=True)
        (directory / "dsx.json").write_text("{}")
    return base / "cluster_0" / tag


def write_about(run: Path, *paths: str) -> None:
    start = {"session": "s", "time": "2026-01-01T00:00:00Z"}
    about = {"format": 1, "starts": [start], "checkpoints": [{"path": path} for path in paths]}
    (run / "run.json").write_text(json.dumps(about))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    save(run / "checkpoints")
    (run / "tensorboard" / "cluster_0").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    return run


def test_a_directory_of_checkpoints_one_of_its_clusters_or_one_of_them(run: Path) -> None:
    base = run / "checkpoints"
    assert find_saved(base) == Saved(base)
    assert find_saved(base, "b") == Saved(base, "b")
    assert find_saved(base / "cluster_1") == Saved(base)
    assert find_saved(base / "cluster_0" / "a") == Saved(base, "a")
    assert find_saved(base / "cluster_1" / "a" / "dsx.json") == Saved(base, "a")
    with pytest.raises(ValueError, match="--tag b and .* are two checkpoints"):
        find_saved(base / "cluster_0" / "a", "b")


def test_a_run_s_folder_or_a_file_in_it(run: Path) -> None:
    assert find_saved(run) == find_saved(run / "metrics.jsonl") == Saved(run / "checkpoints")


def test_checkpoints_elsewhere_are_named_in_run_json(run: Path, tmp_path: Path) -> None:
    tag = save(tmp_path / "big disk")
    write_about(run, str(tag), str(tmp_path / "gone" / "cluster_0" / "a"))
    assert find_saved(run, "a") == Saved(tmp_path / "big disk", "a")
    write_about(run, str(tag), "checkpoints/cluster_0/a")
    with pytest.raises(ValueError, match="big disk.*checkpoints: give one of these directories"):
        find_saved(run)


def test_a_run_that_has_saved_nothing(tmp_path: Path) -> None:
    write_about(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no cluster_<m> with a complete checkpoint"):
        find_saved(tmp_path)


def test_megatron_keeps_them_a_level_deeper(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "dsx")
    (tmp_path / "metrics.jsonl").touch()
    assert find_saved(tmp_path) == Saved(tmp_path / "checkpoints" / "dsx")
