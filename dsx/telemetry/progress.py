"""A line every some seconds that says how a run is doing, on the standard error stream.

    dsx: step 1,200 of 5,000, 12.1 steps/s, 99,123 tokens/s, loss 2.31, sends 18.2 Mbit/s, 98.4 %
    of the exchange hidden, 5 min left

Of the time since the line before. What is not known is left out: tokens and losses are what
`log_step` is told, the number of steps what a framework tells. "Hidden" is the share of the time in
which training was not held up by exchanging.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any


class Progress:
    """One cluster's lines; `seconds` lie between two of them, 0 for none."""

    def __init__(self, cluster_id: int, seconds: float, speaks: bool) -> None:
        self._cluster_id = cluster_id
        self._seconds = seconds
        self._speaks = speaks and seconds > 0
        self._total: int | None = None
        self.begin(0)

    def begin(self, step: int, bytes_sent: int | None = None) -> None:
        """Measure from here; without `bytes_sent` from what has been sent by the next step."""
        self._since = time.perf_counter()
        self._step, self._bytes = step, bytes_sent
        self._blocked = 0.0
        self._tokens = 0
        self._has_tokens = False
        self._loss: float | None = None

    def note(self, fields: Mapping[str, Any]) -> None:
        """Take what is told of the step just taken: `loss`, `tokens`, `total_steps`."""
        if not self._speaks:
            return
        if "total_steps" in fields:
            self._total = int(fields["total_steps"])
        if "loss" in fields:
            self._loss = float(fields["loss"])
        if "tokens" in fields:
            self._tokens += int(fields["tokens"])
            self._has_tokens = True

    def pass_boundary(self, step: int, bytes_sent: int, blocked_seconds: float) -> None:
        """Count a step, and say how the run is doing where it is time to."""
        self._blocked += blocked_seconds
        self._bytes = bytes_sent if self._bytes is None else self._bytes
        if not self._speaks or time.perf_counter() - self._since < self._seconds:
            return
        sys.stderr.write(f"{self.line(step, bytes_sent, time.perf_counter() - self._since)}\n")
        sys.stderr.flush()
        self.begin(step, bytes_sent)

    def line(self, step: int, bytes_sent: int, seconds: float) -> str:
        """Return what is said of the `seconds` since `begin`."""
        rate = (step - self._step) / seconds
        sent = bytes_sent - (self._bytes or 0)
        of = f" of {self._total:,}" if self._total is not None else ""
        parts = [f"dsx: cluster {self._cluster_id}, step {step:,}{of}", f"{rate:.3g} steps/s"]
        if self._has_tokens:
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4g}")
        parts.append(f"sends {sent * 8e-6 / seconds:.3g} Mbit/s")
        parts.append(f"{100 * (1 - self._blocked / seconds):.1f} % hidden")
        if self._total is not None and rate > 0:
            parts.append(f"{_duration((self._total - step) / rate)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
