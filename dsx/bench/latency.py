"""The latency of a testbed's lines: a forwarder's process, from its start to its counts."""

from __future__ import annotations

import json
import subprocess
import sys
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
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise TestbedUnavailable(f"the forwarder has not started: {self._last_words()}")

    def check(self) -> None:
        """Raise TestbedUnavailable if the line is gone."""
        if self._process.poll() is not None:
            raise TestbedUnavailable(f"the forwarder has ended: {self._last_words()}")

    def end(self) -> Counts:
        """End it; what waits is lost. Return what has passed."""
        try:
            counts, errors = self._process.communicate(timeout=_GRACE_SECONDS)  # closes its input
        except subprocess.TimeoutExpired:
            self._process.kill()
            counts, errors = self._process.communicate()
        if self._process.returncode:
            raise TestbedUnavailable(f"the forwarder has failed: {errors.strip()}")
        return Counts(**json.loads(counts))

    def _last_words(self) -> str:
        _, errors = self._process.communicate(timeout=_GRACE_SECONDS)
        lines = errors.strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"
