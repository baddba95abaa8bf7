"""Run commands side by side, as launchers of several sites, without a GPU and with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


def wait_for(process: subprocess.Popen[bytes], log: Path, text: str, seconds: float) -> None:
    """Return once a process has written a text; AssertionError if it does not."""
    until = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def start(command: list[Any], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DSX_")},
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        **environ,
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT,
            env=environment, cwd=log.parent,
        )  # fmt: skip


def run(
    *commands: tuple[list[Any], dict[str, str]], at: Path, timeout_seconds: float = 300
) -> list[tuple[int, str]]:
    """Run commands side by side; return the status and the output of each."""
    logs = [at / f"log{number}" for number in range(len(commands))]
    started = [start(c, log, **e) for (c, e), log in zip(commands, logs, strict=True)]
    try:
        statuses = [process.wait(timeout_seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(status, log.read_text()) for status, log in zip(statuses, logs, strict=True)]
