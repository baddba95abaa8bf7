"""What a rank did when: one JSON line per span, in a file of its own, while the run goes on.

A span has a name, a category, the thread it ran on, and a start and a duration in microseconds.
The clock is monotonic, anchored to the wall clock when the recorder is made: comparable between
the ranks of a host, and between hosts as far as their clocks agree. Times are the host's: what an
accelerator still computes when a call returns is not seen.

Of a transfer nothing but its rounds is known: `follow` stands between an exchange and whoever
drives it, and so sees the time on the network, from a round handed out to the next request, and
the time in codecs, between two rounds; what lies around tells which.

A step's spans are handed over at its boundary and written by a thread of their own, so a killed run
keeps them. A resumed run drops those of steps it takes again. Only the steps asked for are kept.
"""

from __future__ import annotations

import json
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
from dsx.telemetry.jsonl import RecordFile

logger = logging.getLogger(__name__)
now: Callable[[], int] = time.perf_counter_ns
TRAINING = "training"  # what threads are called
TRANSFERS = "dsx-"  # what the names of threads begin with that are not the training's
_Span = tuple[str, str, str, int, int, int, dict[str, Any]]


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
    ) -> None:
        self._path = path
        self._behind = behind or Behind()
        self._session = session
        self._seat = seat
        self._first, self._last = steps
        self._logs = logs
        self._offset = time.time_ns() - now()
        self._begins_at = 0
        self._is_held = False
        self._file: RecordFile | None = None
        self._is_past = False
        self._spans: deque[_Span] = deque()  # any thread appends, one takes
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
        if self._first <= step <= self._last:
            thread = threading.current_thread().name
            thread = thread if thread.startswith(TRANSFERS) else TRAINING
            self._spans.append((name, category, thread, began, ended, step, facts or {}))
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
        if self._file is not None:
            self._behind.do(self._file.close, self._file.path, 0)
            self._file = None
            self._begins_at = self._last  # what still comes goes behind what there is
        self._behind.flush()

    def _hand_over(self) -> None:
        if self._is_held or not self._spans:
            return
        if self._file is None:
            run = {"session": self._session, "step": self._begins_at}
            self._file = RecordFile(self._path, self._begins_at, json.dumps(run) + "\n")
        file, spans = self._file, list[_Span]()
        while self._spans:
            spans.append(self._spans.popleft())
        self._behind.do(lambda: file.append("".join(map(self._line, spans))), file.path, len(spans))

    def _line(self, span: _Span) -> str:
        name, category, thread, began, ended, step, facts = span
        start, end = (began + self._offset) // 1000, (ended + self._offset) // 1000
        record: dict[str, Any] = {"name": name, "category": category, "thread": thread}
        record |= {"start_us": start, "duration_us": end - start, "step": step, **facts}
        return json.dumps(record) + "\n"

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


def trace_path(directory: Path, cluster_id: int, rank: int) -> Path:
    """Return the file of one rank's spans."""
    return directory / f"trace.cluster_{cluster_id}.rank_{rank}.jsonl"


def _between(before: str, after: str) -> tuple[str, str]:
    """Return name and category of what an exchange computes between two rounds, or at its ends."""
    if not before and after == HEADER:
        return "copy", "copy"  # until the values are on the host and have been looked over
    if after == "codes":
        return ("reduce", "reduce") if before == "codes" else ("encode", "encode")
    return ("sideband", "decode") if before == "sideband" else ("decode", "decode")
