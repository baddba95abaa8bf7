"""A bit that has flipped in a saved outer state is refused, with the file, and what to do."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsx.checkpoint.averaged_model import MODULE_FACTS, find_model
from dsx.checkpoint.checksums import MANIFEST, find_damage
from dsx.checkpoint.choice import Candidate, newest_good
from dsx.checkpoint.files import FORMAT, rank_file
from dsx.checkpoint.outer_state import load_state
from dsx.checkpoint.tags import (
    Manifest,
    begin_tag,
    cluster_directory,
    common_tag,
    complete_tag,
    tags_within_reach,
)
from dsx.cli import app
from dsx.comm.topology import RankInfo
from tests.checkpoint.saved import save_state
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

STEPS = (4, 8)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rank_info(cluster: int) -> RankInfo:
    return RankInfo(cluster, 2, 0, 1)


def save_two(base: Path) -> Simulated:
    """A run of two clusters, saved twice as an engine does; its state is that of the second."""
    run = Simulated(TinyNet(), sgd, ALL_CASES["co2"].method(2), 2)
    for step in range(1, STEPS[-1] + 1):
        run.train_step(mean_loss)
        for m, loop in enumerate(run.loops) if step in STEPS else ():
            directory, tag = cluster_directory(base, m), f"step{step}"
            unfinished = directory / begin_tag(directory, tag)
            save_state(loop, unfinished, rank_info(m), "a run", {}, {})
            (unfinished / MODULE_FACTS).write_text(json.dumps({"aliases": {"tied": "weight"}}))
            complete_tag(directory, tag, Manifest(FORMAT, step, "a run", 2, 1))
    return run


def resume(base: Path, run: Simulated, tag: str | None = None) -> list[str]:
    """As the engines do; return the tags."""
    found = [tags_within_reach(base, m) for m in range(2)]

    def examine(one: Candidate) -> list[str | None]:
        return [find_damage(cluster_directory(base, m) / name) for m, name in one.sources]

    if tag is None:
        chosen = newest_good(found, base, examine, tells=False).sources
    else:
        chosen = common_tag(found, base, tag)
    for m, (loop, (source, found)) in enumerate(zip(run.loops, chosen, strict=True)):
        load_state(loop, cluster_directory(base, source) / found, rank_info(m), {})
    return [found for _, found in chosen]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("name", ["dsx_rank_00000.safetensors", MODULE_FACTS, MANIFEST])
def test_one_flipped_bit_in_any_file_is_refused(cluster: int, name: str, tmp_path: Path) -> None:
    run = save_two(tmp_path)
    before = [anchor.clone() for loop in run.loops for anchor in loop.state.anchor]
    path = cluster_directory(tmp_path, cluster) / "step8" / name
    bits = 8 * path.stat().st_size
    drawn = random.Random(cluster).sample(range(bits), 12)
    for bit in (0, bits - 1, *drawn):
        flip(path, bit)
        with pytest.raises(ValueError, match="an earlier") as refused:
            resume(tmp_path, run, "step8")
        assert str(path) in str(refused.value), refused.value
        flip(path, bit)
        after = [anchor for loop in run.loops for anchor in loop.state.anchor]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    flip(path, bits // 2)
    assert "step4" in str(refused.value) or name == MANIFEST
    with pytest.raises(ValueError, match="an earlier"):
        find_model(tmp_path, "step8")
    assert resume(tmp_path, run) == resume(tmp_path, run, "step4") == ["step4"] * 2
    assert find_model(tmp_path, None).step == find_model(tmp_path, "step4").step == 4
    options = ["--tag", "step8", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["export", str(tmp_path), *options])
    assert result.exit_code and not (tmp_path / "out").exists()


def test_a_state_saved_without_a_tag_is_looked_over_too(tmp_path: Path) -> None:
    """Plain PyTorch: `handle.save(directory)`."""
    run = save_two(tmp_path)
    save_state(run.loops[0], tmp_path / "own", rank_info(0), "a run", {}, {})
    load_state(run.loops[0], tmp_path / "own", rank_info(0), {})
    path = rank_file(tmp_path / "own", 0)
    flip(path, 8 * path.stat().st_size - 5)
    with pytest.raises(ValueError, match=f"{path} has changed since it was saved"):
        load_state(run.loops[0], tmp_path / "own", rank_info(0), {})


@pytest.mark.parametrize("damaged", ["no checksum of its own", "no object"])
def test_a_manifest_that_lost_its_own_checksum_is_refused(damaged: str, tmp_path: Path) -> None:
    run = save_two(tmp_path)
    path = cluster_directory(tmp_path, 1) / "step8" / MANIFEST
    told = json.loads(path.read_text())
    del told["checksum"], told["checksums"]["dsx_rank_00000.safetensors"]
    path.write_text(json.dumps(told if damaged == "no checksum of its own" else [told]))
    with pytest.raises(ValueError, match=f"{path} (has changed|cannot be read).* an earlier"):
        resume(tmp_path, run, "step8")
    assert resume(tmp_path, run) == ["step4"] * 2


@pytest.mark.parametrize("left", ["", "0123 dsx_rank", f"{'0' * 64}  dsx_rank_00000.s"])
def test_a_checksum_that_is_not_whole_is_no_checksum_of_another_file(
    left: str, tmp_path: Path
) -> None:
    """Cut off, it would name a file that is not there, and the one that is would not be read."""
    run = save_two(tmp_path)
    save_state(run.loops[0], tmp_path / "own", rank_info(0), "a run", {}, {})
    path = rank_file(tmp_path / "own", 0)
    path.with_name(f"{path.name}.sha256").write_text(left)
    with pytest.raises(ValueError, match=f"sha256 has changed .* the checksum of {path.name}; lo"):
        load_state(run.loops[0], tmp_path / "own", rank_info(0), {})


def test_what_has_no_checksums_loads_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = save_two(tmp_path)
    for manifest in tmp_path.glob(f"*/*/{MANIFEST}"):
        told = json.loads(manifest.read_text())
        del told["checksum"], told["checksums"]
        manifest.write_text(json.dumps(told))
    with caplog.at_level(logging.WARNING):
        load_state(run.loops[0], tmp_path / "cluster_0" / "step8", rank_info(0), {})
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        f"{tmp_path}/cluster_0/step8 has no checksums"
    ]


@pytest.mark.parametrize(("soon", "told"), [(-1.0, True), (60.0, False)])
def test_what_takes_long_says_how_far_it_is(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    soon: float,
    told: bool,
) -> None:
    for module in ("checksums", "weight_files", "snapshot"):
        monkeypatch.setattr(f"dsx.checkpoint.{module}.SOON", soon)
    save_two(tmp_path / "saved")
    command = ["export", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    directory = tmp_path / "saved" / "cluster_0" / "step8"
    assert (f"comparing {directory} with its checksums: " in caplog.text) == told
    assert (f"weights for {tmp_path / 'out'}: " in caplog.text) == told
    assert (f"writing {directory}.unfinished/dsx_rank_00000.safetensors: " in caplog.text) == told
