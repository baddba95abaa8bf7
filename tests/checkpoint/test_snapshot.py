"""What is written beside training is what was there when the save began, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsx.checkpoint import snapshot as snapshots
from dsx.checkpoint.checksums import checksum, require_intact
from dsx.checkpoint.files import rank_file
from dsx.checkpoint.outer_state import take_snapshot
from dsx.checkpoint.snapshot import Snapshot
from dsx.comm.topology import RankInfo
from dsx.training.memory import memory_of
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_reshard import new_tiny
from tests.compress.test_over_gloo import loss, simulated
from tests.simulated import Simulated
from tests.tiny import mean_loss

HERE = RankInfo(0, 2, 0, 1)
STOP, MORE = 7, 8
CASES = [
    ("streaming_diloco", None),
    ("eager_2", None),
    ("co2, element, nesterov, clip", None),
    ("cocodc", None),
    ("slowmo", None),
    ("diloco_delayed", "quantized"),
    ("eager, two", "quantized"),
    ("dilocox", "low_rank"),
    ("diloco_delayed", "two legs"),
]


def begun(name: str, codec: str | None) -> tuple[Simulated, Any]:
    run, of = (simulated(name, codec, 2), loss) if codec else (new_tiny(name), mean_loss)
    for _ in range(STOP):
        run.train_step(of)
    return run, of


@pytest.mark.parametrize(("name", "codec"), CASES)
def test_training_on_changes_nothing_of_it(name: str, codec: str | None, tmp_path: Path) -> None:
    run, of = begun(name, codec)
    loop = run.loops[0]
    save_state(loop, tmp_path / "at once", HERE, "run", {}, {})
    later = take_snapshot(loop, tmp_path / "later", HERE, "run", {}, {})
    later.detach()
    copied = later.num_bytes
    assert 0 < copied <= memory_of(loop).copied_for_save
    loop.state.before_write = later.release
    before = [anchor.clone() for anchor in loop.state.anchor]
    for _ in range(MORE):
        run.train_step(of)
    if any(anchor.numel() for anchor in before):
        assert not all(map(torch.equal, loop.state.anchor, before))
        assert later.num_bytes > copied  # of what an outer step has changed
    later.write()
    files = [rank_file(tmp_path / kind, 0) for kind in ("at once", "later")]
    assert files[0].read_bytes() == files[1].read_bytes()
    require_intact(tmp_path / "later")


def test_it_is_written_while_training_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(snapshots, "_CHUNK_BYTES", 64)
    run, of = begun("streaming_diloco", None)
    loop = run.loops[0]
    for turn in range(4):
        save_state(loop, tmp_path / f"at once {turn}", HERE, "run", {}, {})
        later = take_snapshot(loop, tmp_path / f"later {turn}", HERE, "run", {}, {})
        later.detach()
        loop.state.before_write = later.release
        thread = threading.Thread(target=later.write)
        thread.start()
        for _ in range(MORE):
            run.train_step(of)
        thread.join(30)
        assert later.num_bytes == 0  # nothing is held any more
        sums = [
            checksum(rank_file(tmp_path / f"{kind} {turn}", 0)) for kind in ("at once", "later")
        ]
        assert sums[0] == sums[1]


def test_the_file_is_one_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(5),
        "b": torch.randn(3, 4),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.tensor([1, 0, 1], dtype=torch.uint8),
        "e": torch.randn(4, 6).T,
        "empty": torch.empty(0),
    }
    path = tmp_path / "x.safetensors"
    Snapshot(path, tensors, {"told": "yes"}, {"b": 0}, tells=False).write()
    found = load_file(path)
    assert found.keys() == tensors.keys() - {"empty"}
    assert all(torch.equal(found[name], tensors[name]) for name in found)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_fails_leaves_nothing_half(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x.safetensors"
    Snapshot(path, {"a": torch.zeros(4)}, {}, {}, tells=False).write()
    before = path.read_bytes()

    def full(descriptor: int, chunk: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots.os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device; .* are free there"):
        Snapshot(path, {"a": torch.ones(4)}, {}, {}, tells=False).write()
    assert path.read_bytes() == before and not list(tmp_path.glob("*.tmp"))
