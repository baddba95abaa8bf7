"""The newest good checkpoint that all clusters hold, and why none that is newer."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import pytest
import torch

from dsx.checkpoint.checksums import checksum, find_damage, note_checksum
from dsx.checkpoint.choice import Candidate, newest_good
from dsx.checkpoint.tags import Manifest, begin_tag, complete_tag, tags_within_reach
from tests.checkpoint.test_tags import write


def choose(base: Path, num_clusters: int = 2) -> Candidate:
    found = [tags_within_reach(base, m) for m in range(num_clusters)]

    def examine(candidate: Candidate) -> list[str | None]:
        places = [base / f"cluster_{m}" / tag for m, tag in candidate.sources]
        return [find_damage(place) for place in places]

    return newest_good(found, base, examine, tells=True)


def write_all(base: Path, *steps: int) -> None:
    for cluster in range(2):
        for step in steps:
            write(base, cluster, step)


def test_what_is_damaged_in_one_cluster_is_passed_over_by_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_all(tmp_path, 10, 20, 30)
    (tmp_path / "cluster_1" / "step30" / "content").write_text("")
    assert choose(tmp_path).tag == "step20"
    told = caplog.records[-1].getMessage()
    assert told.startswith("takes checkpoint step20, of step 20, and none that is newer (step30: ")
    assert "cluster 1: " in told and "holds 0 bytes, and " in told


def test_one_manifest_that_cannot_be_read_does_not_block_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_all(tmp_path, 10, 20)
    for text in ("{", "[]", ""):
        (tmp_path / "cluster_0" / "step20" / "dsx.json").write_text(text)
        assert choose(tmp_path).tag == "step10"
        assert "step20: cluster 0: " in caplog.records[-1].getMessage()
    write_all(tmp_path, 20)
    (tmp_path / "cluster_1" / "step10" / "dsx.json").write_text("")
    assert choose(tmp_path).tag == "step20"


def test_what_is_not_finite_is_passed_over_and_so_is_what_one_cluster_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_all(tmp_path, 10)
    write(tmp_path, 0, 20)
    write(tmp_path, 1, 20, trouble="the masters of step 20 are not finite")
    write(tmp_path, 0, 30)
    write(tmp_path, 1, 40)
    assert choose(tmp_path).tag == "step10"
    told = caplog.records[-1].getMessage()
    assert "step20: cluster 1: the masters of step 20 are not finite" in told
    assert "step30: cluster 1 does not hold it complete" in told
    assert "step40: cluster 0 does not hold it complete" in told


def test_nothing_is_told_of_what_is_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dsx")
    write_all(tmp_path, 10, 20)
    write(tmp_path, 1, 15)
    assert choose(tmp_path).tag == "step20"
    assert caplog.records[-1].getMessage() == "takes checkpoint step20, of step 20"


def test_where_none_is_good_it_is_an_error_and_no_new_start(tmp_path: Path) -> None:
    write_all(tmp_path, 10)
    (tmp_path / "cluster_0" / "step10" / "content").unlink()
    with pytest.raises(
        ValueError, match=r"no good checkpoint .*step10: cluster 0: .*holds nothing"
    ):
        choose(tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        choose(tmp_path / "elsewhere")
    write(tmp_path / "half", 0, 10)
    with pytest.raises(FileNotFoundError, match="step10: cluster 1 does not hold it complete"):
        choose(tmp_path / "half")
    for cluster in range(2):
        write(tmp_path / "unreadable", cluster, 10)
        (tmp_path / "unreadable" / f"cluster_{cluster}" / "step10" / "dsx.json").write_text("")
    with pytest.raises(ValueError, match=r"step10: cluster 0: .*; step10: cluster 1: "):
        choose(tmp_path / "unreadable")


def test_a_bit_that_flipped_is_found_by_the_rank_whose_share_it_is(tmp_path: Path) -> None:
    unfinished = tmp_path / begin_tag(tmp_path, "a")
    unfinished.mkdir()
    for rank in range(3):
        outer = unfinished / f"dsx_rank_{rank:05d}.safetensors"
        outer.write_bytes(bytes(range(100)))
        note_checksum(outer, checksum(outer))
        torch.save({"x": torch.arange(100)}, unfinished / f"of_engine_{rank}.pt")
    complete_tag(tmp_path, "a", Manifest(8, 4, "run", 1, 3))
    tag = tmp_path / "a"
    assert [find_damage(tag, rank, 3) for rank in range(3)] == [None] * 3
    for name in ("dsx_rank_00001.safetensors", "of_engine_2.pt"):
        path = tag / name
        whole = path.read_bytes()
        with zipfile.ZipFile(tag / "of_engine_2.pt") as file:
            inside = max(file.infolist(), key=lambda info: info.file_size)
        place = 50 if name.startswith("dsx") else inside.header_offset + 200
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        told = [find_damage(tag, rank, 3) for rank in range(3)]
        assert sum(why is not None for why in told) == 1
        assert f"{path} has changed since it was saved" in next(filter(None, told))
        path.write_bytes(whole)
    assert find_damage(tag) is None
