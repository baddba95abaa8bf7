"""Which transfers are applied at a boundary, and how many steps after a launch that is.

With a tau that follows from the line, fragments that are sent one after another have it for
themselves each, and are applied as soon as a transfer is known to be through: in H/P steps where
the line is always busy. A line that needs more than half of a period is said once: training waits
for it then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from dsx.core.types import History, Stage, SyncParams
from dsx.method.ladder import Ladder
from dsx.method.method import Method
from dsx.outer.transfer import NothingYet, Transfer

logger = logging.getLogger(__name__)


class Overlap:
    """Decides from what all clusters agree on, never from what has arrived."""

    def __init__(self, method: Method, stage: Stage, ladder: Ladder) -> None:
        self._delay = method.delay
        self._most = ladder.most_overlap
        self._least_interval = method.control.lowest_interval(method.sync_params)
        self._stage = stage
        self._is_warned = False

    def sync_params(
        self, fragment: int, params: SyncParams, history: History, shared_by: int
    ) -> SyncParams:
        """Return what is in force at a launch of the fragment, tau with it unless it is fixed.

        `shared_by` are launched at this boundary. H may fall to the least while this one is under
        way, which has to be over by its next launch.
        """
        interval = min(params.interval, self._least_interval)
        overlap = self._delay.overlap(fragment, interval, history, shared_by)
        if overlap is None or params.overlap is not None:
            return params
        overlap = min(overlap, self._most)
        self._warn_of_a_slow_line(fragment, overlap, history, shared_by)
        return replace(params, overlap=overlap)

    def ripe(
        self, in_flight: Sequence[Transfer | NothingYet], step: int
    ) -> list[Transfer | NothingYet]:
        """Return what is to be applied at a boundary, in launch order."""
        found: list[Transfer | NothingYet] = []
        for index, transfer in enumerate(in_flight):
            newer = sum(t.fragment == transfer.fragment for t in in_flight[index + 1 :])
            is_launched = isinstance(transfer, Transfer)
            age = step - transfer.launched if is_launched else 0
            overlap = transfer.sync_params.overlap if is_launched else None
            if self._delay.is_ripe(age, newer) if overlap is None else age >= overlap:
                found.append(transfer)
        return found

    def _warn_of_a_slow_line(
        self, fragment: int, overlap: int, history: History, shared_by: int
    ) -> None:
        alone, step = history.transfer_seconds[fragment], history.step_seconds
        if self._is_warned or not alone or not step or shared_by * alone <= overlap * step:
            return
        self._is_warned, transfer = True, shared_by * alone
        needed = 2 * math.ceil(transfer / step)
        logger.warning(
            "%s takes %.3g s on the line, %.1f inner steps of %.3g s, and delay.steps='auto' has "
            "at most %d, half of schedule.interval: training waits for it; use an interval of %d "
            "or more, or fewer bits (dsx.compression)",
            self._stage.name_of(fragment), transfer, transfer / step, step, overlap, needed,
        )  # fmt: skip
