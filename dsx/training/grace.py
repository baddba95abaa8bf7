"""Whether a step and a save fit into the time that a process is left after a signal."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from pathlib import Path
from statistics import median

from dsx.outer.loop import OuterLoop

logger = logging.getLogger(__name__)
_FIRST_STEPS = 5  # after which a step's time is known; the very first compile and allocate
_PROBED_BYTES = 64 << 20  # less is written in no time


class Grace:
    """The times of one rank, and the warning if they are too long together; it is given once."""

    def __init__(self, seconds: float, speaks: bool) -> None:
        self._seconds = seconds
        self._speaks = speaks
        self._steps: deque[float] = deque(maxlen=_FIRST_STEPS)
        self.num_steps = 0
        self._passed = time.perf_counter()
        self._save: tuple[float, str] | None = None
        self._is_told = False

    def pass_boundary(self) -> None:
        """Take the time of a step."""
        now = time.perf_counter()
        self._steps.append(now - self._passed)
        self._passed = now
        self.num_steps += 1
        if self.num_steps == _FIRST_STEPS + 1:
            self._compare()

    def saved(self, seconds: float) -> None:
        """Take the time of a save, which counts more than an estimate."""
        self._passed = time.perf_counter()  # that of the step begins behind it
        self._save = seconds, "the last one took"
        self._compare()

    def estimate(self, num_bytes: int, folder: Path) -> None:
        """Take the time that so many bytes would need, by writing some. On another thread."""
        if not self._speaks or self._save is not None or num_bytes < _PROBED_BYTES:
            return
        while not folder.is_dir():
            folder = folder.parent
        probe = folder / f".dsx_probe_{os.getpid()}.tmp"
        started = time.perf_counter()
        try:
            with probe.open("wb") as file:
                file.write(os.urandom(1 << 20) * (_PROBED_BYTES >> 20))
                file.flush()
                os.fsync(file.fileno())
            seconds = (time.perf_counter() - started) * num_bytes / _PROBED_BYTES
        except OSError as error:
            logger.info("no estimate of a save: %s", error)
            return
        finally:
            probe.unlink(missing_ok=True)
        if self._save is None:
            told = f"estimated from {num_bytes / 1e9:.1f} GB and what {folder} takes per second:"
            self._save = seconds, told
            self._compare()

    def estimate_of(self, loop: OuterLoop, folder: Path) -> None:
        """Take the time of what the ranks of this host write: masters, moments, outer state."""
        state = loop.state
        numel = sum(fragment.numel for fragment in loop.adapter.fragments)
        outer = sum(
            tensor.numel() * tensor.element_size()
            for fragment in loop.adapter.fragments
            for tensor in state.named_state(fragment.id).values()
        )
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.estimate((12 * numel + outer) * ranks, folder)

    def _compare(self) -> None:
        if self._is_told or not self._speaks or len(self._steps) < _FIRST_STEPS:
            return
        step = median(self._steps)
        save, how = self._save or (0.0, "")
        if step + save <= self._seconds:
            return
        self._is_told = True
        of_save = f" and a save ({how} {save:.1f} s)" if save else ""
        logger.warning(
            "a step (%.1f s)%s takes longer than clusters.grace_seconds=%g: told to end, this "
            "cluster would be killed before it has saved; let whoever ends it wait longer and say "
            "so there, or save more often", step, of_save, self._seconds,
        )  # fmt: skip
