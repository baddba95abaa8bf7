"""A store that is lost or silent in the middle of training ends nothing: all train on, and save.

The launcher's store and that of the clusters are one here, in a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry import sync_records
from tests.distributed import free_port, run_distributed
from tests.engines.engines import quiet
from tests.engines.resumes import PLACES, ROWS, build, end, take_step
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]


@pytest.fixture
def store() -> Iterator[tuple[int, int]]:
    """The port of a store, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "dsx", "rendezvous", "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and "listening" in process.stdout.readline()
    yield port, process.pid
    process.kill()
    process.wait()


def train_on(base: str, port: int, pid: int, how: int, place: str) -> dict[str, Any]:
    quiet()
    sync_records._MOST_SECONDS = 2.0
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    metrics = {"metrics": {"dir": f"{base}/run"}}
    row = ROWS["diloco"]
    engine = build(row._replace(overrides={**row.overrides, **metrics}), PLACES[place])
    handle = engine.dsx
    for step in range(1, 7):
        take_step(engine, step)
    if handle.cluster_id == engine.global_rank == 0:
        os.kill(pid, how)
    slowest = 0.0
    for step in range(7, 100):
        if step == 9 and handle.cluster_id == engine.global_rank == 1:
            handle.request_stop("the store is gone")
        began = time.monotonic()
        take_step(engine, step)
        slowest = max(slowest, time.monotonic() - began)
        if handle.should_stop():
            break
    engine.save_checkpoint(base, tag="stopped")
    handle.finish()
    with handle.averaged():
        gathered = handle.gather(handle.cluster_id)
    engine.save_checkpoint(base, tag="finished")
    engine.load_checkpoint(base)
    result = {"step": handle.step, "gathered": gathered, "is_finished": handle.is_finished}
    began = time.monotonic()
    end(engine)
    return {**result, "is_quick": slowest < 20 and time.monotonic() - began < 20}


@pytest.mark.parametrize("place", ["zero1", "pipeline, zero1"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["lost", "silent"])
def test_training_goes_on_to_its_end(
    how: int, place: str, store: tuple[int, int], tmp_path: Path
) -> None:
    arguments = (str(tmp_path), *store, how, place)
    first, *others = run_distributed(train_on, 4, *arguments, timeout_seconds=400)
    assert others == [first] * 3
    assert 9 < first["step"] <= 9 + 3 * 8
    assert first["gathered"] == [0, 1] and first["is_finished"] and first["is_quick"]
    for cluster in range(2):
        for tag in ("stopped", "finished"):
            assert (tmp_path / f"cluster_{cluster}" / tag / "dsx.json").is_file()
