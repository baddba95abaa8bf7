"""The latency of a testbed's lines: a forwarder's process, from its start to its counts."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dsx.bench import forwarder
from dsx.bench.forwarder import Counts
from dsx.bench.namespaces import TestbedUnavailable

_GRACE_SECONDS = 10.0


class Latency:
    """Delays what passes between interfaces of a namespace until `end`; dies with this process.

    TestbedUnavailable if the forwarder cannot start, or has ended by itself.
    """

    def __init__(self, namespace: str, interfaces: Sequence[str], seconds: float) -> None:
        self.seconds = seconds
        path = str(Path(forwarder.__file__))
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-I", path, str(seconds)]
            + list(interfaces),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the testbed's, which ends what uses the line first
            text=True,
        )
        self._await_ready()

    def check(self) -> None:
        """Raise TestbedUnavailable if the line is gone."""
        if self._process.poll() is not None:
            raise TestbedUnavailable(f"the forwarder has ended: {self._last_words()}")

    def end(self) -> Counts:
        """End it; what waits is lost. Return what has passed."""
        counts, errors = self._finish()
        if self._process.returncode:
            raise TestbedUnavailable(f"the forwarder has failed: {errors.strip()}")
        return Counts(**json.loads(counts))

    def _await_ready(self) -> None:
        assert self._process.stdout is not None
        pipe, said = self._process.stdout.fileno(), b""
        until = time.monotonic() + _GRACE_SECONDS
        while not said.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                self._kill()
                raise TestbedUnavailable(
                    f"the forwarder has not started within {_GRACE_SECONDS:g} s: "
                    f"{self._last_words()}"
                )
            chunk = os.read(pipe, 100)
            if not chunk:
                break
            said += chunk
        if said != b"ready\n":
            raise TestbedUnavailable(f"the forwarder has not started: {self._last_words()}")

    def _last_words(self) -> str:
        _, errors = self._finish()
        lines = errors.strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"

    def _finish(self) -> tuple[str, str]:
        """Close its input, wait for its end, kill what goes on; return what it has written."""
        try:
            return self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.communicate()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
