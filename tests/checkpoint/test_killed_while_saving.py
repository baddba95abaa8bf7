"""kill -9 at any moment of a save leaves the last complete checkpoint, whole."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint import snapshot as snapshots
from dsx.checkpoint.files import FORMAT
from dsx.checkpoint.outer_state import load_state, take_snapshot
from dsx.checkpoint.tags import Manifest, begin_tag, complete_tag, complete_tags
from dsx.comm.topology import RankInfo
from dsx.outer.loop import OuterLoop
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_reshard import new_tiny
from tests.levels import by_default

PLACE = RankInfo(0, 2, 0, 1)


def set_to(loop: OuterLoop, step: int) -> None:
    loop.history.step = step
    for fragment in loop.adapter.fragments:
        for tensor in loop.state.named_state(fragment.id).values():
            tensor.fill_(step)


def save_for_ever(loop: OuterLoop, directory: Path, step: int, is_one_tag: bool) -> None:
    while True:
        step += 1
        set_to(loop, step)
        tag = "last" if is_one_tag else f"step{step % 3}"
        unfinished = begin_tag(directory, tag)
        save_state(loop, directory / unfinished, PLACE, "run", {}, {})
        complete_tag(directory, tag, Manifest(FORMAT, step, "run", 2, 1))


def let_run(child: int, seconds: float) -> None:
    """Return once a process has had so much of a processor, whatever others take of it."""
    ticks, until = seconds * os.sysconf("SC_CLK_TCK"), time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.002)
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        if int(fields[11]) + int(fields[12]) >= ticks:
            return


def save_beside_for_ever(loop: OuterLoop, directory: Path, step: int, is_one_tag: bool) -> None:
    """Let a thread write each, while what has been saved changes under it, as by outer steps."""
    snapshots._CHUNK_BYTES = 4096
    while True:
        step += 1
        set_to(loop, step)
        tag = "last" if is_one_tag else f"step{step % 3}"
        unfinished = begin_tag(directory, tag)
        snapshot = take_snapshot(loop, directory / unfinished, PLACE, "run", {}, {})
        snapshot.detach()
        thread = threading.Thread(target=snapshot.write)
        thread.start()
        for fragment in loop.adapter.fragments:
            snapshot.release(fragment.id)
        set_to(loop, -step)
        thread.join()
        complete_tag(directory, tag, Manifest(FORMAT, step, "run", 2, 1))


@pytest.mark.parametrize("save", [save_for_ever, save_beside_for_ever], ids=["at once", "beside"])
@pytest.mark.parametrize(
    ("is_one_tag", "num_kills"),
    by_default([(False, 10), (False, 20), (True, 20)], (False, 10)),
    ids=["tags", "more tags", "one tag"],
)
def test_the_last_complete_checkpoint_survives(
    is_one_tag: bool, num_kills: int, save: Any, tmp_path: Path
) -> None:
    saving, loading = (new_tiny("streaming_diloco").loops[0] for _ in range(2))
    noise = random.Random(0)
    newest, kills_in_between = 0, 0
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            save(saving, tmp_path, newest, is_one_tag)
        let_run(child, 0.03 + 0.12 * noise.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        manifests = complete_tags(tmp_path)
        if not manifests:
            assert newest == 0
            continue
        tag = max(manifests, key=lambda name: manifests[name]["step"])
        assert manifests[tag]["step"] >= newest
        newest = manifests[tag]["step"]
        kills_in_between += any(path.suffix == ".unfinished" for path in tmp_path.iterdir())
        for tag, manifest in manifests.items():
            load_state(loading, tmp_path / tag, PLACE, {})
            assert loading.history.step == manifest["step"]
            for fragment in loading.adapter.fragments:
                for tensor in loading.state.named_state(fragment.id).values():
                    assert (tensor == manifest["step"]).all()
    assert newest > num_kills / 2
    assert kills_in_between > num_kills / 6
