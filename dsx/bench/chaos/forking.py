"""The process from which ranks are forked, as the driver talks to it (nursery.py)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class NoProgress(RuntimeError):
    """Those who should go on do not."""


class Nursery:
    """The process that forks ranks."""

    def __init__(
        self, directory: Path, before: Sequence[str] = (), module: str = "dsx.bench.chaos.nursery"
    ) -> None:
        """Start it; `before` are words that stand before its command, which runs a module."""
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", module, str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            stderr=(directory / "nursery.log").open("ab"),
        )  # fmt: skip
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ask(self, **fields: Any) -> None:
        """Ask for a rank."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, seconds: float) -> list[dict[str, Any]]:
        """Return what it has said, waiting so long at most. NoProgress if it has ended."""
        if not self._selector.select(seconds):
            return []
        data = os.read(self._out, 1 << 16)
        if not data:
            raise NoProgress("the process that forks ranks has ended; see nursery.log")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it; ranks are ended by their own numbers."""
        self._selector.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
