"""A line every some seconds that says how a run is doing, on the standard error stream.

    dsx: cluster 0, step 1,200 of 5,000 (24 %), 12.1 steps/s, 99,123 tokens/s, loss 2.31, sends
    18.2 Mbit/s, 96 % of the transfers hidden, utilization 98.4 %, 5 min left

Of the time since the line before. What is not known is left out: tokens and losses are what
`log_step` is told, or else what is seen of training (seen_training.py), the number of steps what a
framework tells. Hidden is the share of the transfers' time that this rank has not waited for, 0 for
a blocking method; utilization is the share of the time in which training was not held up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from dsx.core.host_numbers import HostNumbers

_LOSS_SECONDS = 10.0  # between two looks at a loss that nobody tells


class Progress:
    """One cluster's lines; `seconds` lie between two of them, 0 for none.

    Told of one rank's transfers, it counts `num_senders` times their bytes: parts are of one size.
    What figures show (`is_shown`) it keeps in `loss` and `tokens`, also where no line is written.
    """

    def __init__(
        self,
        cluster_id: int,
        seconds: float,
        speaks: bool,
        num_senders: int = 1,
        is_shown: bool = False,
    ) -> None:
        self._cluster_id = cluster_id
        self._num_senders = num_senders
        self._seconds = seconds
        self._speaks = speaks and seconds > 0
        self._is_shown = is_shown
        self.total_steps: int | None = None  # of the run, where somebody tells it
        self.last_step: Mapping[str, float] = {}  # the record of the last one
        self.loss: float | None = None  # the last one that was told, or read where it was seen
        self._loss_read = time.perf_counter()
        self._is_loss_told = False
        self._all_told: int | None = None  # tokens since this began
        self._all_seen = 0
        self.begin(0)

    def begin(self, step: int) -> None:
        """Measure from here."""
        self._since = time.perf_counter()
        self._step, self._bytes = step, 0
        self._blocked = self._waited = self._transferred = 0.0
        self._tokens: int | None = None
        self._loss: float | None = None
        self._seen_loss: Any = None  # a number, or a tensor that is read when a line is written
        self._coming: HostNumbers | None = None  # one of those, on its way from a device
        self._seen_tokens = 0

    @property
    def watches(self) -> bool:
        """Whether what is told and seen goes anywhere."""
        return self._speaks or self._is_shown

    @property
    def tokens(self) -> int | None:
        """All tokens so far, as told or else as seen; None if nobody knows of any."""
        return (self._all_seen or None) if self._all_told is None else self._all_told

    def see(self, *, loss: Any = None, tokens: int = 0) -> None:
        """Take what is seen of training, and said where nobody tells it."""
        self._seen_loss = self._seen_loss if loss is None else loss
        self._seen_tokens += tokens
        self._all_seen += tokens

    def note(self, fields: Mapping[str, Any]) -> None:
        """Take what is told of the step just taken: `loss`, `tokens`, `total_steps`."""
        if "total_steps" in fields:
            self.total_steps = int(fields["total_steps"])
        if not self.watches:
            return
        if "loss" in fields:
            self._loss = self.loss = float(fields["loss"])
            self._is_loss_told = True
        if "tokens" in fields:
            tokens = int(fields["tokens"])
            self._tokens = tokens + (self._tokens or 0)
            self._all_told = tokens + (self._all_told or 0)

    def note_sync(self, event: Mapping[str, Any]) -> None:
        """Take a transfer that was applied: its bytes, its seconds, and those waited for it."""
        self._bytes += event["bytes_sent"] * self._num_senders
        self._waited += event["wait_seconds"]
        self._transferred += event["transfer_seconds"] or 0.0

    def pass_boundary(self, step: int, blocked_seconds: float) -> None:
        """Count a step, and say how the run is doing where it is time to.

        A loss that a device still computes is not waited for: it is said a step or so later.
        """
        self._blocked += blocked_seconds
        now = time.perf_counter()
        is_due = self._speaks and now - self._since >= self._seconds
        is_looked_at = (
            self._is_shown and not self._is_loss_told and now - self._loss_read >= _LOSS_SECONDS
        )
        if not (is_due or is_looked_at) or not self._has_come():
            return
        if is_looked_at and self._seen_loss is not None:
            self._loss_read, self.loss = now, float(self._seen_loss)
        if is_due:
            sys.stderr.write(f"{self.line(step, now - self._since)}\n")
            sys.stderr.flush()
            self.begin(step)

    def _has_come(self) -> bool:
        """Whether the loss that was seen is a number, and no tensor; else it begins to come."""
        if self._coming is None:
            if self._seen_loss is None or self._loss is not None:
                return True
            seen = self._seen_loss
            self._coming = HostNumbers(
                {"loss": seen.detach().reshape(()) if hasattr(seen, "detach") else seen}
            )
        if not self._coming.are_there:
            return False
        self._seen_loss, self._coming = self._coming.read()["loss"], None
        return True

    def line(self, step: int, seconds: float) -> str:
        """Return what is said of the `seconds` since `begin`."""
        rate = (step - self._step) / seconds
        of = ""
        if self.total_steps:
            of = f" of {self.total_steps:,} ({100 * step / self.total_steps:.0f} %)"
        parts = [f"dsx: cluster {self._cluster_id}, step {step:,}{of}", f"{rate:.3g} steps/s"]
        tokens = self._seen_tokens if self._tokens is None else self._tokens
        if tokens or self._tokens is not None:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        loss = self._seen_loss if self._loss is None else self._loss
        if loss is not None:
            parts.append(f"loss {float(loss):.4g}")
        parts.append(f"sends {self._bytes * 8e-6 / seconds:.3g} Mbit/s")
        if self._transferred > 0:
            hidden = max(1 - self._waited / self._transferred, 0.0)
            parts.append(f"{100 * hidden:.0f} % of the transfers hidden")
        parts.append(f"utilization {100 * (1 - self._blocked / seconds):.1f} %")
        if self.total_steps is not None and rate > 0:
            parts.append(f"{_duration((self.total_steps - step) / rate)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
