"""Who takes what a run tells: a server for spans and notices, and a reader of its pages."""

from __future__ import annotations

import threading
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

SPANS, NOTICES = "/v1/traces", "/notices"
_SOON_SECONDS = 0.1
_EVERY_SECONDS = 1.0  # between two looks at a page; Prometheus' own are 15 s apart, or so
_ANSWER_SECONDS = 5.0


class Stub:
    """Counts what has come, by path; `pages_read` those that were fetched. A context."""

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.received: Counter[str] = Counter()
        self.pages_read: Counter[int] = Counter()
        self._pages, self._is_over = pages, threading.Event()
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                received[self.path] += 1
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, daemon=True),
            threading.Thread(target=self._read_pages, daemon=True),
        ]

    @property
    def address(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Stub:
        """Begin to serve, and to read."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End both."""
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(2 * _ANSWER_SECONDS)

    @property
    def _seconds_to_next(self) -> float:
        are_there = all(self.pages_read[port] for port in self._pages)
        return _EVERY_SECONDS if are_there else _SOON_SECONDS  # a short run is over in a second

    def _read_pages(self) -> None:
        """Look at each page every second, as a Prometheus does; oftener before all are there."""
        while not self._is_over.wait(self._seconds_to_next):
            for port in self._pages:
                try:
                    address = f"http://127.0.0.1:{port}/metrics"
                    with urllib.request.urlopen(address, timeout=_ANSWER_SECONDS) as answer:
                        self.pages_read[port] += b"dsx_step" in answer.read()
                except OSError:
                    continue  # not there yet, or no more: what was read is counted
