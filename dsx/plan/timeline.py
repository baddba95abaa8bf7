"""Compute and transfers of a run of dsx, in time: who waits for what, and for how long.

What dsx does, and the DAG of `dsx simulate` does not: a fragment leaves when its launch step's
optimizer has stepped (dreamddp: when its own backward is done), has a thread and a connection of
its own, and is waited for as a whole at the boundary where it is applied. Fragments under way at
once therefore *share* the link. The bytes and the end of the last one are those of a FIFO; an
earlier one ends later. Where all are waited for at one boundary (`periodic`), and where the link is
full all the time, nothing changes in the long run. Else, where fragments of unequal size have
boundaries of their own (`streaming`, `adaptive`), the next one takes its share while the older one
is being waited for, and steps wait longer than behind a FIFO.

A transfer holds its thread for its coding, the latency of its messages, and its share of the link;
transfers of one fragment come one after another.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """What one transfer of a fragment takes: its thread's seconds before, and after, the link's.

    `coded_before` and `coded_after` are those of them in which a core is busy.
    """

    before: float
    link: float
    after: float
    blocking: float = 0.0  # of the training thread, when it is applied
    coded_before: float = 0.0
    coded_after: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds from launch to arrival on an idle link."""
        return self.before + self.link + self.after


class Launch(NamedTuple):
    """A fragment that leaves within a period: `early` seconds before the end of step `step`."""

    step: int
    fragment: int
    early: float = 0.0


class SharedLink:
    """Processor sharing in virtual time: each of n transfers gets 1/n of the link.

    So many may code `at_once`, in the order in which they come to it; None: all.
    """

    def __init__(self, num_fragments: int, at_once: int | None = None) -> None:
        self._cores = None if at_once is None else [0.0] * at_once  # when each is free
        self._now = 0.0
        self._virtual = 0.0  # seconds of link that each transfer since the start would have had
        self._ready: list[tuple[float, int]] = []  # for a core
        self._coming: list[tuple[float, int]] = []  # to the link
        self._sending: list[tuple[float, int]] = []  # by the virtual time of their ends
        self._costs: list[Cost] = []
        self._ends: list[float | None] = []
        self._last: list[int | None] = [None] * num_fragments
        self._queued: dict[int, int] = {}  # what waits for what on one thread

    def launch(self, now: float, fragment: int, cost: Cost) -> int:
        """Start a transfer, or queue it behind the fragment's last; return its number."""
        self._run(until=now)
        number, last = len(self._costs), self._last[fragment]
        self._costs.append(cost)
        self._ends.append(None)
        self._last[fragment] = number
        if last is None or self._ends[last] is not None:
            behind = 0.0 if last is None else self._ends[last] or 0.0
            heapq.heappush(self._ready, (max(now, behind), number))
        else:
            self._queued[last] = number
        return number

    def end(self, number: int) -> float:
        """Return when a transfer ends, if nothing is launched before that."""
        while self._ends[number] is None:
            self._next_event()
        return self._ends[number] or 0.0

    def _run(self, until: float) -> None:
        while self._next_time() <= until:
            self._next_event()
        self._pass(until)

    def _next_time(self) -> float:
        next = min((heap[0][0] for heap in (self._ready, self._coming) if heap), default=math.inf)
        if not self._sending:
            return next
        left = max(self._sending[0][0] - self._virtual, 0.0)
        return min(next, self._now + left * len(self._sending))

    def _next_event(self) -> None:
        at = self._next_time()
        if self._ready and self._ready[0][0] <= at:
            ready, number = heapq.heappop(self._ready)
            cost = self._costs[number]
            begins = self._core(ready, cost.coded_before)
            heapq.heappush(self._coming, (begins + cost.before, number))
            return
        is_coming = bool(self._coming) and self._coming[0][0] <= at
        if is_coming:
            self._pass(at)
            _, number = heapq.heappop(self._coming)
            ends = self._virtual + self._costs[number].link
            heapq.heappush(self._sending, (ends, number))
            return
        self._now, self._virtual = at, self._sending[0][0]
        _, number = heapq.heappop(self._sending)
        cost = self._costs[number]
        self._ends[number] = end = self._core(at, cost.coded_after) + cost.after
        after = self._queued.pop(number, None)
        if after is not None:
            heapq.heappush(self._ready, (end, after))

    def _core(self, at: float, seconds: float) -> float:
        """Keep the core that is free first busy for so long; return from when on."""
        if self._cores is None or not seconds:
            return at
        begins = max(at, self._cores[0])
        heapq.heapreplace(self._cores, begins + seconds)
        return begins

    def _pass(self, now: float) -> None:
        if self._sending and now > self._now:
            self._virtual += (now - self._now) / len(self._sending)
        self._now = max(now, self._now)


@dataclass(frozen=True)
class Timeline:
    """A period of `steps` inner steps with its launches, in order, and what they cost.

    A transfer is waited for `overlap_steps` steps after its launch, or right after its fragment's
    launch `rounds_late` launches later. So many transfers may code `at_once`; None: all.
    """

    steps: int
    step_seconds: float
    launches: Sequence[Launch]
    costs: Sequence[Cost]
    overlap_steps: int = 0
    rounds_late: int = 0
    at_once: int | None = None

    def period_seconds(self, warm_up: int = 4, periods: int = 6) -> float:
        """Return a period in the long run: the mean of `periods` after `warm_up` others.

        Never less than what it takes of the link and of a fragment's thread: with two rounds under
        way it takes more periods than these until a backlog is felt.
        """
        by_step: dict[int, list[Launch]] = {self.steps: []}
        for launch in self.launches:
            by_step.setdefault(launch.step, []).append(launch)
        clock = _Clock(self)
        ends = [0.0]
        for period in range(warm_up + periods):
            for step in sorted(by_step):
                clock.pass_boundary(period * self.steps + step, by_step[step])
            ends.append(clock.now)
        return max((ends[-1] - ends[warm_up]) / periods, self._busiest_seconds())

    def _busiest_seconds(self) -> float:
        """Return the seconds of a period for which the link, cores, or some thread, are held."""
        of_link, of_cores, of_threads = 0.0, 0.0, [0.0] * len(self.costs)
        for launch in self.launches:
            cost = self.costs[launch.fragment]
            of_link += cost.link
            of_threads[launch.fragment] += cost.alone
            if self.at_once is not None:
                of_cores += (cost.coded_before + cost.coded_after) / self.at_once
        return max(of_link, of_cores, *of_threads)


class _Clock:
    """The training thread."""

    def __init__(self, timeline: Timeline) -> None:
        self.now = 0.0
        self._timeline = timeline
        self._step = 0
        self._link = SharedLink(len(timeline.costs), timeline.at_once)
        self._under_way: list[deque[int]] = [deque() for _ in timeline.costs]
        self._waits: deque[tuple[int, int]] = deque()  # step, fragment; in launch order

    def pass_boundary(self, step: int, launches: Sequence[Launch]) -> None:
        """Compute up to a step, launch, then apply; as the loop does, launches come first."""
        while self._waits and self._waits[0][0] < step:
            self._compute(self._waits[0][0])
            self._apply()
        self._compute(step)
        for launch in launches:
            cost = self._timeline.costs[launch.fragment]
            number = self._link.launch(self.now - launch.early, launch.fragment, cost)
            self._under_way[launch.fragment].append(number)
            self._waits.append((step + self._timeline.overlap_steps, launch.fragment))
        self._apply()

    def _compute(self, step: int) -> None:
        self.now += (step - self._step) * self._timeline.step_seconds
        self._step = step

    def _apply(self) -> None:
        """Wait for all that is due."""
        while self._waits and self._waits[0][0] <= self._step:
            _, fragment = self._waits.popleft()
            under_way = self._under_way[fragment]
            if len(under_way) > self._timeline.rounds_late:
                end = self._link.end(under_way.popleft())
                self.now = max(self.now, end) + self._timeline.costs[fragment].blocking
