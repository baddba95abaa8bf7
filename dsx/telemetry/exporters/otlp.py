"""OpenTelemetry spans of rounds, transfers, heals and saves, through the SDK, to an OTLP collector.

They are made of what training records at its boundaries, so nothing is added to a transfer's way; a
round begins at the boundary that launched it and ends at the one that applied it. A batch processor
sends them on a thread of its own. The provider is this run's, and no global one is set.

Spans of one round have one trace in all clusters: its number follows from the run and the round.
Where the script has a span of its own under way (Megatron-LM's, or any other), ours are below it.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an extra
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)
PATH = "/v1/traces"
_NANO = 1_000_000_000
_MOST_BOUNDARIES = 100_000  # that rounds may be of
_CLOSE_SECONDS = 5.0
_EXPORT_SECONDS = 5
_MOST_LETTERS = 300  # of what the library says
_FACTS = (
    "fragment", "stage", "round", "launched_step", "applied_step", "interval", "bytes_sent",
    "refused_by", "differed_in", "uncommitted_by", "idle_in", "guard_alarms",
)  # fmt: skip
_LEFT_OUT = ("refused_by", "differed_in", "uncommitted_by")


class Spans:
    """One cluster's spans, told by its first rank; used by the training thread alone.

    Raises ModuleNotFoundError without the extra.
    """

    def __init__(self, endpoint: str, cluster: int, session: str, preset: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "dsx.metrics.otlp is set but OpenTelemetry's SDK is not installed: pip install "
                '"dsx-train[otel]"', name=error.name,
            ) from error  # fmt: skip
        self._trace, self._session, self._cluster = trace, session, cluster
        self._ids = _Numbers()
        resource = Resource.create(
            {"service.name": "dsx", "dsx.session": session, "dsx.cluster": cluster,
             "dsx.preset": preset, "service.instance.id": f"{session}/{cluster}"}
        )  # fmt: skip
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + PATH, timeout=_EXPORT_SECONDS)
        self._exporter = _told_once(exporter, endpoint)
        self._provider = TracerProvider(
            resource=resource, id_generator=_generator(self._ids), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("dsx")
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._boundaries: dict[int, int] = {}  # when each step ended, in ns since 1970
        self._order: deque[int] = deque()
        self._saves_since: int | None = None
        self._num_made = 0
        self._is_closed = False
        self._process = os.getpid()
        atexit.register(self.close)  # where nobody closes it: what is held goes out

    def begin(self, step: int) -> None:
        """Go on from a step."""
        self._boundaries.clear()
        self._order.clear()
        self.step(step)

    def step(self, step: int) -> None:
        """Take that a boundary is passed now."""
        self._boundaries[step] = self._now()
        self._order.append(step)
        if len(self._order) > _MOST_BOUNDARIES:
            self._boundaries.pop(self._order.popleft(), None)

    def sync(self, record: Mapping[str, Any]) -> None:
        """Take the record of a sync: a round, its transfer, and how long training waited for it."""
        began = self._boundaries.get(record["launched_step"])
        ended = self._boundaries.get(record["applied_step"], self._now())  # at the run's end: now
        if began is None:
            return  # launched before this process began
        facts = {key: _plain(record[key]) for key in _FACTS if record.get(key) is not None}
        place = f"{record.get('stage', 0)}/{record['fragment']}/{record['launched_step']}"
        is_left_out = any(record.get(key) for key in _LEFT_OUT)
        with self._ids.of(f"{self._session}/{place}"):
            whole = self._start("dsx.round", began, facts)
            below = self._trace.set_span_in_context(whole)
            taken = int((record.get("transfer_seconds") or 0.0) * _NANO)
            parts = ("coding_seconds", "turn_seconds", "commit_seconds")
            seconds = {key: record[key] for key in parts if record.get(key) is not None}
            self._between("dsx.transfer", began, began + taken, {**facts, **seconds}, below)
            waited = int((record.get("wait_seconds") or 0.0) * _NANO)
            if waited:
                self._between("dsx.wait", max(ended - waited, began), ended, facts, below)
            if is_left_out:
                status = self._trace.Status(self._trace.StatusCode.ERROR, "left out")
                whole.set_status(status)
            whole.end(max(ended, began))

    def saving(self) -> None:
        """Take that a save begins now."""
        self._saves_since = self._now()

    def saved(self, path: str, step: int) -> None:
        """Take that a checkpoint is complete."""
        since, self._saves_since = self._saves_since, None
        if since is not None:
            self._between("dsx.save", since, self._now(), {"path": path, "step": step})

    def healed(self, seconds: float, num_bytes: int, step: int) -> None:
        """Take that this cluster has come to the others, which took so long, and ends now."""
        now, facts = self._now(), {"bytes": num_bytes, "step": step}
        self._between("dsx.heal", now - int(seconds * _NANO), now, facts)

    def close(self) -> None:
        """Return once what there is has been sent, or some seconds are over."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        ending = threading.Thread(target=self._provider.shutdown, name="dsx-otlp-end", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            self._provider.force_flush(int(1000 * _CLOSE_SECONDS))
        else:
            ending.join(_CLOSE_SECONDS)
        self._exporter.tell_rest(self._num_made, is_over=not ending.is_alive())

    def _now(self) -> int:
        return time.perf_counter_ns() + self._offset

    def _start(self, name: str, began: int, facts: Mapping[str, Any], below: Any = None) -> Any:
        self._num_made += 1
        told = {"cluster": self._cluster, **facts}
        attributes = {f"dsx.{key}": value for key, value in told.items()}
        return self._tracer.start_span(name, below, attributes=attributes, start_time=began)

    def _between(
        self, name: str, began: int, ended: int, facts: Mapping[str, Any], below: Any = None
    ) -> None:
        self._start(name, began, facts, below).end(ended)


class _Numbers:
    """Which number the next trace gets: one that follows from a name, else any.

    Not of Python's own generator, as the SDK's are: a script's random numbers stay as they are.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._random = random.SystemRandom()

    def of(self, name: str) -> _Numbers:
        """Let a trace that begins inside have the number of a name."""
        self._name = name
        return self

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *error: object) -> None:
        self._name = None

    def of_span(self) -> int:
        """Return the number of a new span."""
        return self._random.getrandbits(64) or 1

    def of_trace(self) -> int:
        """Return the number of a new trace."""
        if self._name is None:
            return self._random.getrandbits(128) or 1
        digest = hashlib.sha256(self._name.encode()).digest()
        return int.from_bytes(digest[:16], "big") or 1


def _generator(numbers: _Numbers) -> Any:
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Generator(IdGenerator):
        def generate_span_id(self) -> int:
            return numbers.of_span()

        def generate_trace_id(self) -> int:
            return numbers.of_trace()

    return Generator()


def _told_once(exporter: Any, endpoint: str) -> Any:
    """Return an exporter that says once that nothing arrives, and counts."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    library = logging.getLogger(type(exporter).__module__)
    quiet = _Quiet()
    library.addFilter(quiet)

    class Told(SpanExporter):
        def __init__(self) -> None:
            self.num_sent, self.has_told = 0, False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            with quiet:
                result = exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                self.num_sent += len(spans)
            else:
                if not self.has_told:
                    logger.warning(
                        "spans do not arrive at %s (metrics.otlp): %s; training goes on, and how "
                        "many are lost is told at the end", endpoint, quiet.why or "no answer",
                    )  # fmt: skip
                self.has_told = True
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return bool(exporter.force_flush(timeout_millis))

        def tell_rest(self, num_made: int, is_over: bool) -> None:
            if is_over:  # else it is still at it
                library.removeFilter(quiet)
            if num_made > self.num_sent:
                logger.warning(
                    "%d of %d spans have not arrived at %s", num_made - self.num_sent, num_made,
                    endpoint,
                )  # fmt: skip

    return Told()


class _Quiet(logging.Filter):
    """Keeps what the library logs of an export of ours: several lines every five seconds.

    Those of other threads, which may have an exporter of the script's own, pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = 0
        self.why = ""

    def __enter__(self) -> None:
        self._thread, self.why = threading.get_ident(), ""

    def __exit__(self, *error: object) -> None:
        self._thread = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is shown."""
        if record.thread != self._thread:
            return True
        text = " ".join(record.getMessage().split())[:_MOST_LETTERS]
        self.why = self.why or text  # the first line has the reason
        return False


def _plain(value: Any) -> Any:
    """Return a value as an attribute may be."""
    return tuple(value) if isinstance(value, list) else value
