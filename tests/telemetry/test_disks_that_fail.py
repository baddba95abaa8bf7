"""A real run whose folder fills up, vanishes or cannot be written to trains to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.telemetry.run_folder import open_run, read_about
from tests.distributed import run_distributed
from tests.telemetry.trace.runs import block, read_timeline
from tests.tiny import TinyNet, batch

pytestmark = pytest.mark.ci
NUM_STEPS, TROUBLE = 60, 20


def train(folder: str, what: str) -> dict[str, Any]:
    """Train one cluster; at step TROUBLE cluster 0 does `what` to the folder of both."""
    config = block("streaming_diloco", dir=folder, trace=True, tensorboard=True)
    world = dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    for step in range(1, NUM_STEPS + 1):
        if step == TROUBLE:
            handle._records._behind.flush()
            handle.gather(None)  # neither writes while the folder goes
            if world.cluster_id == 0 and what == "remove":
                shutil.rmtree(folder)
            if world.cluster_id == 0 and what == "fill":
                fill(Path(folder))
            handle.gather(None)
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
        handle.log_step(loss=1.0 / step)
    handle.finish()
    handle.close()
    return handle._records._behind.missing.by_file()


def fill(folder: Path) -> None:
    """Leave no byte on the folder's disk."""
    with (folder / "other").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


@contextmanager
def disk_of(size: str, folder: Path) -> Generator[Path, None, None]:
    """A disk of a size as `mount` takes it, at a folder that it makes."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "dsx-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    with disk_of("4m", tmp_path / "disk") as folder:
        yield folder


def test_a_full_disk_takes_records_and_nothing_else(small_disk: Path) -> None:
    run = small_disk / "run"
    for cluster, missing in enumerate(run_distributed(train, 2, str(run), "fill")):
        name = "metrics.cluster_1.jsonl" if cluster else "metrics.jsonl"
        assert missing[name] > 10 and missing[f"trace.cluster_{cluster}.rank_0.jsonl.gz"] > 10
    (run / "other").unlink()
    for part in open_run(run).clusters:  # what is there can be read
        steps = [record["step"] for record in part.steps]
        assert steps[: TROUBLE - 2] == list(range(1, TROUBLE - 1)) and len(steps) < NUM_STEPS
    assert min(span.step for span in read_timeline(run).spans) == 1
    assert set(read_about(run)) == {0, 1}
    assert not list(run.rglob("*.tmp"))


def test_a_folder_that_vanishes_takes_records_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for cluster, missing in enumerate(run_distributed(train, 2, str(run), "remove")):
        name = "metrics.cluster_1.jsonl" if cluster else "metrics.jsonl"
        assert missing[name] > 30 and missing[name.replace("metrics", "run").removesuffix("l")]
    assert not run.exists()
