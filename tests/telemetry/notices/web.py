"""A real server on this host that answers as it is told, and keeps what it was sent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dsx.telemetry.notices.notice import Kind, Notice


class Web:
    """Answers with `statuses`, one after another, and then with the last one; `seconds` late."""

    def __init__(self, statuses: Sequence[int] = (200,), seconds: float = 0.0) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.times: list[float] = []
        self.headers: dict[str, str] = {}
        left, web = [*statuses], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                web.times.append(time.monotonic())
                web.got.append((self.path, dict(self.headers), body))
                status = left.pop(0) if len(left) > 1 else left[0]
                web.is_over.wait(seconds)
                try:
                    self.send_response(status)
                    for name, value in web.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(b"ok")
                except OSError:
                    pass  # who called has gone

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.is_over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/services/T0/SECRET"

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.got]

    def wait_for(self, count: int, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while len(self.got) < count and time.monotonic() < until:
            time.sleep(0.01)
        assert len(self.got) >= count, self.got


def notice(kind: Kind = "lost", text: str = "cluster 1 is lost", **more: Any) -> Notice:
    fields = {"cluster": 0, "clusters": (1,), "step": 120, "run": "first", "host": "a", "time": 0.0}
    return Notice(kind, text, **{**fields, **more})
