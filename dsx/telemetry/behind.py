"""Writing into a run's folder on a thread of its own: no step waits for a disk, and none fails.

What has been handed over is written in order, also where the program ends by an error. What cannot
be written is counted (missing.py). A disk that hangs is waited for at the end, and not for ever.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from dsx.core.waits import waiting_for
from dsx.telemetry.missing import Missing

_MOST_EARLY = 1000  # lines, of a handle that never takes a step
_MOST_WAITING = 100_000  # pieces of work, for a disk that hangs
_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class _Work:
    """Writes `records` records of a file, or a file as a whole."""

    do: Callable[[], object]
    path: Path
    records: int
    is_whole: bool


class Behind:
    """Does what it is given, one after another, on a thread that starts with the first."""

    def __init__(
        self,
        deadline_seconds: float = _DEADLINE_SECONDS,
        waits_for: str = "the disk of the run's folder",
    ) -> None:
        self.missing = Missing()
        self._deadline_seconds, self._waits_for = deadline_seconds, waits_for
        self._queue: SimpleQueue[_Work | Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._is_closed = False

    def do(
        self, do: Callable[[], object], path: Path, records: int = 1, is_whole: bool = False
    ) -> bool:
        """Have something written soon; `is_whole`: it is all that the file at `path` holds.

        False where so much waits that it will not be; it is counted as missing then.
        """
        work = _Work(do, path, records, is_whole)
        if self._is_closed or os.getpid() != self._process:  # no thread: a worker's is its parent's
            self._run(work)
        elif self._queue.qsize() >= _MOST_WAITING:
            self.missing.add(path, "the disk does not answer", records)
            return False
        else:
            self._queue.put(work)
            self._start()
        return True

    def flush(self) -> int:
        """Return once everything has been done, or after a deadline, where a disk hangs; and how
        many pieces of work are left then, the one under way among them.
        """
        if self._thread is None or self._is_closed or os.getpid() != self._process:
            return 0
        is_done = threading.Event()
        self._queue.put(is_done.set)
        with waiting_for(self._waits_for, self._deadline_seconds):
            has_come = is_done.wait(self._deadline_seconds)
        if has_come:
            return 0
        self._deadline_seconds = min(1.0, self._deadline_seconds)  # it has been waited for
        return self._queue.qsize()  # with the sign of its end in place of what is under way

    def close(self) -> None:
        """Return once everything has been done; what still comes is done at once."""
        self.flush()
        if self._thread is not None and os.getpid() == self._process and not self._is_closed:
            self._queue.put(None)
            self._thread.join(self._deadline_seconds)
            atexit.unregister(self.close)
        self._is_closed = True

    def _start(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="run-folder", daemon=True
                    )
                    atexit.register(self.close)
                    self._thread.start()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, _Work):
                self._run(work)
            else:
                work()

    def _run(self, work: _Work) -> None:
        try:
            work.do()
        except Exception as error:  # whatever a writer of others' raises: nothing ends by it
            told = error.strerror if isinstance(error, OSError) and error.strerror else error
            self.missing.add(work.path, str(told), work.records)
        else:
            if work.is_whole:
                self.missing.forget(work.path)


class RunLog(logging.Handler):
    """What the logger "dsx" lets through, in a file; lines are collected until `begin`.

    Where nothing else shows what dsx logs, warnings go to the terminal, as without this handler.
    """

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        self._path: Path | None = None
        self._behind = behind
        self._early: deque[str] | None = deque(maxlen=_MOST_EARLY)
        lines = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        lines.converter = time.gmtime
        lines.default_time_format, lines.default_msec_format = "%Y-%m-%dT%H:%M:%SZ", None
        self.setFormatter(lines)
        logging.getLogger("dsx").addHandler(self)

    def begin(self, path: Path) -> None:
        """Write from now on, behind what the file holds."""
        self._path = path
        self._behind.do(path.touch, path, 0)
        early, self._early = self._early or (), None
        for line in early:
            self._write(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line; the thread that logs does not wait for the file."""
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_alone():
            last.handle(record)
        line = self.format(record) + "\n"
        if self._early is None:
            self._write(line)
        else:
            self._early.append(line)

    def close(self) -> None:
        """Take no more lines."""
        logging.getLogger("dsx").removeHandler(self)
        super().close()

    def _is_alone(self) -> bool:
        """Whether nobody else shows what dsx logs; of several logs the first one does."""
        own = logging.getLogger("dsx")
        others = [h for h in own.handlers if not isinstance(h, RunLog)]
        elsewhere = others or (own.propagate and logging.getLogger().handlers)
        return not elsewhere and own.handlers[:1] == [self]

    def _write(self, line: str) -> None:
        path = self._path
        assert path is not None

        def append() -> None:
            with path.open("a") as file:
                file.write(line)

        self._behind.do(append, path)
