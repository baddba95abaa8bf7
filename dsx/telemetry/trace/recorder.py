"""What a rank did when: its spans, step by step, in files of its own, while the run goes on.

A span has a name, a category, the thread it ran on, and a start and a duration in microseconds.
The clock is monotonic, anchored to the wall clock when the recorder is made: comparable between
the ranks of a host, and between hosts as far as their clocks agree. Times are the host's: what an
accelerator still computes when a call returns is not seen.

Of a transfer nothing but its rounds is known: `follow` stands between an exchange and whoever
drives it, and so sees the time on the network, from a round handed out to the next request, and
the time in codecs, between two rounds; what lies around tells which.

A step's spans are handed over at its boundary and written by a thread of their own, so a killed run
keeps them. A resumed run drops those of steps it takes again. Only the steps asked for are kept.
What a disk that hangs would let pile up is dropped, and counted: in the trace, and at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsx.core.exchange import HEADER, HEADER_BYTES, Exchange
from dsx.core.membership import Seat
from dsx.core.recorder import Recorder, SpanTimer
from dsx.telemetry.behind import Behind
from dsx.telemetry.trace.batch import TRAINING, TRANSFERS, Noted
from dsx.telemetry.trace.parts import Parts

logger = logging.getLogger(__name__)
now: Callable[[], int] = time.perf_counter_ns
MOST_BYTES = 32 << 20  # of one rank's trace
_MOST_WAITING = 200_000  # spans that are not written yet, some 50 MB


class Trace(Recorder):
    """Records one rank's spans of the steps from first to last; any thread may add.

    `logs`: whether to say when the last of them is past.
    """

    def __init__(
        self,
        path: Path,
        session: str,
        seat: Seat,
        steps: tuple[int, int],
        logs: bool = True,
        behind: Behind | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._behind = behind or Behind()
        self._session = session
        self._seat = seat
        self._first, self._last = steps
        self._logs = logs
        self._offset = time.time_ns() - now()
        self._begins_at = 0
        self._is_held = False
        self._parts: Parts | None = None
        self._is_past = False
        self._spans: deque[Noted] = deque()  # any thread appends, one takes
        self._handed, self._passed = 0, 0  # spans given to the writer, and those behind it
        self._dropped: deque[int] = deque()  # spans, since the last piece
        self._free_since: dict[int, int] = {}  # a fragment's thread, after a transfer
        self.step = 1  # the one being taken

    def begin(self, step: int, path: Path | None = None) -> None:
        """Go on from `step`: what an earlier start wrote beyond it goes with the first record.

        With a path, in that file, and not before a boundary has been passed (or `confirm`).
        """
        self.close()
        self._path, self._is_held = path or self._path, path is not None
        self._begins_at, self.step, self._is_past = step, step + 1, False
        if step >= self._last:
            self._tell("nothing is traced any more")

    def add(
        self,
        name: str,
        category: str,
        began: int,
        step: int | None = None,
        facts: dict[str, Any] | None = None,
    ) -> int:
        """Record a span of this thread that ends now, and return now; times are `now()`'s."""
        ended = now()
        step = self.step if step is None else step
        if not self._first <= step <= self._last:
            return ended
        if len(self._spans) < _MOST_WAITING:
            thread = threading.current_thread().name
            thread = thread if thread.startswith(TRANSFERS) else TRAINING
            self._spans.append((name, category, thread, began, ended, step, facts or {}))
        else:
            self._drop(1, "so many spans between two boundaries")
        return ended

    @contextmanager
    def span(self, name: str, category: str) -> Generator[None, None, None]:
        """Record what runs inside."""
        began = now()
        yield
        self.add(name, category, began)

    def span_timer(self, name: str, fragment: int, step: int) -> SpanTimer:
        """Begin a span of the training thread that concerns a fragment."""
        return _SpanTimer(self, name, fragment, step)

    def follow(self, exchange: Exchange, fragment: int, step: int) -> Exchange:
        """Return an exchange that records its rounds, and what is computed between them.

        It has to begin with the parity check's header, which is the launch handshake's round.
        """
        return self._followed(exchange, now(), fragment, step)

    def _followed(self, exchange: Exchange, submitted: int, fragment: int, step: int) -> Exchange:
        began = max(submitted, self._free_since.get(fragment, 0))  # else still the one before
        peers = [self._seat.ids[m] for m in self._seat.others]
        before, at = "", began
        total, rounds = 0, 0
        facts: dict[str, Any] = {"fragment": fragment, "launched": step}
        while True:
            try:
                round = next(exchange)
            except StopIteration as stop:
                at = self.add(*_between(before, ""), at, step, facts)
                self.add("transfer", "transfer", began, step, {**facts, "bytes": total})
                self._free_since[fragment] = now()
                return stop.value
            at = self.add(*_between(before, round.what), at, step, facts)
            is_header, before = not before and round.what == HEADER, round.what
            sent = HEADER_BYTES * len(peers) if is_header else round.bytes_sent(self._seat)
            total += sent
            yield round
            counts = {**facts, "bytes": sent, "peers": peers, "round": rounds}
            names = ("handshake", "meet") if is_header else (round.what, "network")
            at = self.add(*names, at, step, counts)
            rounds += 1

    def confirm(self) -> None:
        """Write from now on."""
        self._is_held = False

    def end_step(self, step: int) -> None:
        """Hand over what there is; a boundary has been passed."""
        self.confirm()
        self.step = step + 1
        self._hand_over()
        if step >= self._last and not self._is_past:
            self._tell("the last step traced has been taken")

    def flush(self) -> None:
        """Return once what there is has been written."""
        self._hand_over()
        self._behind.flush()

    def close(self) -> None:
        """Write what there is and close the file."""
        self._hand_over()
        if self._parts is not None:
            self._behind.do(self._parts.close, self._parts.path, 0)
            self._parts = None
            self._begins_at = self._last  # what still comes goes behind what there is
        self._behind.flush()

    def _hand_over(self) -> None:
        if self._is_held or not self._spans:
            return
        if self._parts is None:
            self._parts = Parts(self._path, self._session, self._begins_at, self._most_bytes)
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        if self._handed - self._passed + len(spans) > _MOST_WAITING:
            self._drop(len(spans), "the disk does not answer")
            return
        dropped = sum(self._dropped.popleft() for _ in range(len(self._dropped)))
        parts = self._parts
        self._handed += len(spans)
        if not self._behind.do(lambda: self._write(parts, spans, dropped), parts.path, len(spans)):
            self._handed -= len(spans)
            self._dropped.append(dropped + len(spans))

    def _write(self, parts: Parts, spans: list[Noted], dropped: int) -> None:
        """Write on the thread that does; OSError: the spans are not there, and dropped."""
        try:
            parts.append([self._by_the_wall_clock(span) for span in spans], dropped)
        except OSError:
            self._dropped.append(dropped + len(spans))
            raise
        finally:
            self._passed += len(spans)

    def _by_the_wall_clock(self, span: Noted) -> Noted:
        """Return a span with times in microseconds since 1970."""
        name, category, thread, began, ended, step, facts = span
        start, end = (began + self._offset) // 1000, (ended + self._offset) // 1000
        return name, category, thread, start, end, step, facts

    def _drop(self, count: int, why: str) -> None:
        self._dropped.append(count)
        self._behind.missing.add(self._path, why, count)

    def _tell(self, what: str) -> None:
        self._is_past = True
        if self._logs:
            steps = self._first, self._last
            logger.info("%s: %s (metrics.trace_steps is [%d, %d])", self._path, what, *steps)


class _SpanTimer(SpanTimer):
    def __init__(self, trace: Trace, name: str, fragment: int, step: int) -> None:
        self._trace = trace
        self._name = name
        self._step = step
        self._facts = {"fragment": fragment}
        self._began = self._at = now()

    def mark(self, name: str, category: str | None = None) -> None:
        category = category or self._name
        self._at = self._trace.add(name, category, self._at, self._step, self._facts)

    def end(self, **facts: Any) -> None:
        facts = {**self._facts, **facts}
        self._trace.add(self._name, self._name, self._began, self._step, facts)


def _between(before: str, after: str) -> tuple[str, str]:
    """Return name and category of what an exchange computes between two rounds, or at its ends."""
    if not before and after == HEADER:
        return "copy", "copy"  # until the values are on the host and have been looked over
    if after == "codes":
        return ("reduce", "reduce") if before == "codes" else ("encode", "encode")
    return ("sideband", "decode") if before == "sideband" else ("decode", "decode")
