"""What was saved while training diverged is not gone on from, and pushes nothing good out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dsx.checkpoint.checksums import (
    DAMAGED,
    MANIFEST,
    find_damage,
    read_manifest,
    take_checksums,
)
from dsx.checkpoint.diverged import mark_diverged
from dsx.checkpoint.keep import superfluous
from dsx.checkpoint.tags import complete_tags
from tests.checkpoint.test_choice import choose
from tests.checkpoint.test_tags import write


def test_a_run_that_was_killed_after_going_back_does_not_take_the_bad_stretch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for cluster in range(2):
        for step in (10, 20, 30, 40):
            write(tmp_path, cluster, step)
    assert mark_diverged(tmp_path / "cluster_0", 25, "a") == ["step30", "step40"]
    assert choose(tmp_path).tag == "step20"  # where the other was killed before it had marked its
    assert mark_diverged(tmp_path / "cluster_1", 25, "a") == ["step30", "step40"]
    assert mark_diverged(tmp_path / "cluster_1", 35, "a") == []
    assert choose(tmp_path).tag == "step20"
    told = caplog.records[-1].getMessage()
    assert "step40: cluster 0: diverged since step 25; cluster 1: diverged since step 25" in told
    for tag in ("step30", "step40"):
        assert find_damage(tmp_path / "cluster_1" / tag) is None  # its own checksum is right
    write(tmp_path, 0, 30)
    write(tmp_path, 1, 30)  # once more, behind the stretch
    assert choose(tmp_path).tag == "step30"


def test_it_does_not_count_among_the_last_few(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write(tmp_path, 0, step)
    directory = tmp_path / "cluster_0"
    common = {tag: told["step"] for tag, told in complete_tags(directory).items()}
    assert superfluous(complete_tags(directory), common, 2) == ["step10", "step20", "step30"]
    mark_diverged(directory, 25, "a")
    assert superfluous(complete_tags(directory), common, 2) == []
    write(tmp_path, 0, 60)
    common["step60"] = 60
    assert superfluous(complete_tags(directory), common, 2) == ["step10"]


def test_other_runs_and_what_cannot_be_read_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dsx")
    write(tmp_path, 0, 30, "before")
    write(tmp_path, 0, 40, trouble="the masters at step 40: not finite")
    write(tmp_path, 0, 50)
    directory = tmp_path / "cluster_0"
    (directory / "step50" / "dsx.json").write_text("{")
    assert mark_diverged(directory, 25, "a") == []
    held = complete_tags(directory)
    assert held["step30"]["trouble"] == "" and DAMAGED in held["step50"]
    assert held["step40"]["trouble"] == "the masters at step 40: not finite"
    assert mark_diverged(tmp_path / "none", 25, "a") == []


def test_a_librarys_folder_is_not_damaged_by_what_a_tag_in_it_comes_to_say(tmp_path: Path) -> None:
    write(tmp_path, 0, 30)
    folder = tmp_path / "cluster_0"
    told = read_manifest(folder / "step30" / MANIFEST)
    (folder / MANIFEST).write_text(json.dumps(take_checksums(folder, told)))
    assert mark_diverged(folder, 25, "a") == ["step30"]
    assert mark_diverged(tmp_path, 25, "a") == ["cluster_0"]
    assert find_damage(folder) is None
    inner = folder / "step30" / MANIFEST
    inner.write_text(inner.read_text().replace("since step 25", "since step 99"))
    assert (
        find_damage(folder) == f"{inner} has changed since it was written: its checksum is another"
    )
    inner.unlink()
    assert str(find_damage(folder)).startswith(f"{inner} holds nothing, and ")
