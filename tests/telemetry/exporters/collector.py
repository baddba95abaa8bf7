"""A collector of OTLP over HTTP in this process, which decodes with the SDK's own proto."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Found:
    """One span; times in seconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    facts: dict[str, Any]
    resource: dict[str, Any]
    is_error: bool


class Collector:
    """Keeps the spans that it has been sent."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Found] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.add(self.path)
                if status == 200:
                    collector.spans += _decoded(body)
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def of(self, name: str) -> list[Found]:
        return [span for span in self.spans if span.name == name]


def _decoded(body: bytes) -> list[Found]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        Found(
            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
            span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9,
            _plain(span.attributes), _plain(of.resource.attributes), span.status.code == 2,
        )
        for of in request.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]  # fmt: skip


def _plain(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = [getattr(v, v.WhichOneof("value")) for v in value.values]
        found[one.key] = value
    return found
