"""A period of a method as a picture in characters: what leaves, is under way, and is applied.

The method's own schedule, delay and control are asked at every boundary, in the order of
outer/loop.py: launch what is due, then apply what is ripe. Nothing is computed, and nothing sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from dsx.core.types import History, Stage, SyncParams
from dsx.method.method import Method

LEGEND = "# launched  - under way  o applied  @ both  . nothing"
_WIDEST = 60


class Transfer(NamedTuple):
    """A fragment's way: the steps of its launch and of its apply, which is None if it is to come.

    `launched` is 0 for the empty transfers that next-sync delays start with.
    """

    fragment: int
    launched: int
    applied: int | None
    interval: int


def transfers_of(method: Method, numels: Sequence[int], stage: Stage, steps: int) -> list[Transfer]:
    """Return what the first inner steps launch of fragments of these sizes, in launch order.

    What a run measures is not known here: there are no times, and all norms are alike.
    """
    history = History(len(numels), list(numels))
    schedule = method.schedule
    under_way = [
        Transfer(fragment, 0, None, 0)
        for fragment in range(len(numels))
        for _ in range(method.delay.rounds_under_way)
    ]
    found: list[Transfer] = []
    schedule.advance(history, _sync_params(method, history))
    for step in range(1, steps + 1):
        due = list(schedule.due(step, history, _sync_params(method, history), stage))
        history.step = step
        for fragment in due:
            interval = step - history.launched[fragment]
            under_way.append(Transfer(fragment, step, None, interval))
            history.launched[fragment] = step
            history.launches[fragment] += 1
            history.under_way[fragment] += 1
        for transfer in _ripe(method, under_way, history):
            under_way.remove(transfer)
            history.under_way[transfer.fragment] -= 1
            if transfer.launched:
                _take(history, transfer)
                found.append(transfer._replace(applied=step))
        schedule.advance(history, _sync_params(method, history))
    found += [transfer for transfer in under_way if transfer.launched]
    return sorted(found, key=lambda transfer: transfer.launched)


def _sync_params(method: Method, history: History) -> SyncParams:
    return method.control.sync_params(method.sync_params, history)


def _ripe(method: Method, under_way: Sequence[Transfer], history: History) -> list[Transfer]:
    found: list[Transfer] = []
    interval = _sync_params(method, history).interval
    for index, transfer in enumerate(under_way):
        newer = sum(t.fragment == transfer.fragment for t in under_way[index + 1 :])
        age = history.step - transfer.launched if transfer.launched else 0
        overlap = method.delay.overlap(transfer.fragment, interval, history)
        if method.delay.is_ripe(age, newer) if overlap is None else age >= overlap:
            found.append(transfer)
    return found


def _take(history: History, transfer: Transfer) -> None:
    fragment = transfer.fragment
    history.applied[fragment] = history.step
    history.rounds[fragment] += 1
    history.intervals[fragment] = transfer.interval
    history.mean_norm[fragment] = 1.0


class Period(NamedTuple):
    """A stretch of steps to draw, from 1: the first one from which on periods are alike."""

    first: int
    last: int

    @property
    def columns(self) -> int:
        """Characters of a line."""
        return -(-(self.last - self.first + 1) // self.steps_per_column)

    @property
    def steps_per_column(self) -> int:
        """Steps that one character stands for."""
        return -(-(self.last - self.first + 1) // _WIDEST)


def period_of(method: Method) -> Period:
    """Return the period to draw: the first one where times that a run measures change the next."""
    steps = method.schedule.interval
    is_measured = method.schedule.uses_seconds or method.delay.uses_seconds
    before = 0 if is_measured else 1 + method.delay.rounds_under_way
    return Period(before * steps + 1, (before + 1) * steps)


def draw(transfers: Sequence[Transfer], num_fragments: int, period: Period) -> list[str]:
    """Return a line per fragment, with its name; fragments in a row that do the same share one."""
    rows = [
        "".join(_cell(own, column, period) for column in range(period.columns))
        for own in ([t for t in transfers if t.fragment == f] for f in range(num_fragments))
    ]
    width = len(f"fragments {num_fragments - 1}-{num_fragments - 1}")
    lines: list[str] = []
    for row, group in groupby(enumerate(rows), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in group]
        name = f"fragment {numbers[0]}"
        if len(numbers) > 1:
            name = f"fragments {numbers[0]}-{numbers[-1]}"
        lines.append(f"{name:<{width}}  {row}")
    return lines


def _cell(transfers: Sequence[Transfer], column: int, period: Period) -> str:
    first = period.first + column * period.steps_per_column
    steps = range(first, min(first + period.steps_per_column, period.last + 1))
    is_launched = any(t.launched in steps for t in transfers)
    is_applied = any(t.applied in steps for t in transfers)
    is_under_way = any(
        t.launched < steps.start and (t.applied is None or t.applied >= steps.stop)
        for t in transfers
    )
    marks = {(True, True): "@", (True, False): "#", (False, True): "o"}
    return marks.get((is_launched, is_applied), "-" if is_under_way else ".")
