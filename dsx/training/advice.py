"""What the preset `recommended` asks of a run, and says where it is not so: length, and decay.

Source: the study in docs/methods/shift.md. What local steps cost falls with the number of rounds,
and most of it with the decay of the inner rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dsx.config.schema import DsxConfig

logger = logging.getLogger(__name__)

FEWEST_ROUNDS = 500
DECAYED = 0.1  # of the largest inner rate


class Advice:
    """Watches one rank's steps; says each thing once, and nothing under any other preset.

    `inner_lr` is asked after each step, `length` for the steps of the whole run, None if not told.
    """

    def __init__(
        self,
        config: DsxConfig,
        inner_lr: Callable[[], float],
        length: Callable[[], int | None],
        speaks: bool,
    ) -> None:
        self._interval = config.method.schedule.interval
        self._inner_lr, self._length = inner_lr, length
        self._speaks = speaks and config.preset == "recommended"
        self._largest = 0.0
        self._is_whole = True  # whether all steps of the run were seen
        self._has_told_length = False

    def begin(self, step: int) -> None:
        """Go on from a step."""
        self._is_whole = self._is_whole and step == 0

    def pass_boundary(self) -> None:
        """Take the rate of the step just taken, and the run's length once somebody has told it."""
        if self._speaks and self._is_whole:
            self._largest = max(self._largest, self._inner_lr())
        if (length := self._length()) is not None:
            self._look_at_length(length, "has")

    def end(self, step: int) -> None:
        """Look at a run that is finished."""
        if step:
            self._look_at_length(step, "has had")
        rate = self._inner_lr() if self._speaks else 0.0
        if self._is_whole and 0 < DECAYED * self._largest < rate:
            logger.warning(
                "preset 'recommended': the inner rate has ended at %.3g, %.0f %% of its largest; "
                "with a decay to near 0 clusters end closer to each other, and to data parallel "
                "(docs/methods/shift.md)",
                rate, 100 * rate / self._largest,
            )  # fmt: skip

    def _look_at_length(self, steps: int, verb: str) -> None:
        if not self._speaks or self._has_told_length:
            return
        self._has_told_length = True
        if steps < FEWEST_ROUNDS * self._interval:
            logger.warning(
                "preset 'recommended': this run %s %d steps, %.0f rounds of %d. That is a try of "
                "it: it is meant for %d rounds or more (%d steps), and loses more before; a short "
                "run that counts is better off with a smaller schedule.interval",
                verb, steps, steps / self._interval, self._interval, FEWEST_ROUNDS,
                FEWEST_ROUNDS * self._interval,
            )  # fmt: skip
