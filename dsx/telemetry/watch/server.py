"""The page over HTTP: its files, the state as it changes (server-sent events), and charts.

Everything can be read and nothing changed. As many callers as there are places are answered at a
time, and others cut off; one that neither reads nor says anything loses its place.
"""

from __future__ import annotations

import gzip
import json
import math
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dsx.telemetry.few_callers import FewCallers
from dsx.telemetry.watch.access import HEADERS, Access

MOST_CALLERS = 32  # at once
MOST_STREAMS = 16  # of them, that are told of each change
_IDLE_SECONDS = 15.0  # that a connection may say nothing, or not read
_LEAST_GZIP_BYTES = 1000
_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
Answer = Callable[[dict[str, str]], Any]  # a JSON object for the fields of a query
Text = Callable[[], tuple[str, bytes]]  # its kind, and itself; ModuleNotFoundError says what lacks


class PageServer(FewCallers, HTTPServer):
    """Serves `answers`, by path, and the page's files. OSError where the port cannot be had.

    `next_state` waits for a state other than that of a version, for so many seconds at most, and
    returns it with its version.
    """

    block_on_close = False
    request_queue_size = MOST_CALLERS

    def __init__(
        self,
        host: str,
        port: int,
        access: Access,
        answers: dict[str, Answer],
        next_state: Callable[[int], tuple[int, dict[str, Any]]],
        texts: dict[str, Text] | None = None,
    ) -> None:
        self.access = access
        self.texts = texts or {}
        self.answers = answers
        self.next_state = next_state
        self.files = _page_files()
        self.is_ending = False
        self.places = threading.Semaphore(MOST_CALLERS)
        self.streams = threading.Semaphore(MOST_STREAMS)
        host = host.removeprefix("[").removesuffix("]")  # as an address of the web has it
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((found[0][4][0], port), _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind, without a look-up of the host's own name: that may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a caller that has gone; what else goes wrong is a fault of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection. What is asked is not logged: an address may have the token in it."""

    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dsx", ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer."""
        path, _, query = self.path.partition("?")
        fields = {name: values[-1] for name, values in parse_qs(query).items()}
        if not self.server.access.is_named_rightly(self.headers.get("Host")):
            self._refuse(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this page is for localhost, 127.0.0.1 or [::1]: open it under one of these names",
            )
        elif not self._may_read(path, fields):
            return
        elif path in self.server.files:
            kind, body = self.server.files[path]
            self._send(HTTPStatus.OK, kind, body)
        elif path == "/events":
            self._stream()
        elif path in self.server.answers:
            self._answer(self.server.answers[path], fields)
        elif path in self.server.texts:
            self._say(self.server.texts[path])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request that is served: nothing can be changed here."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:  # any other method
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        self._refuse(status, "this page can be read (GET, HEAD) and nothing else")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _may_read(self, path: str, fields: dict[str, str]) -> bool:
        """Whether the caller has the token; one that came with it is sent on without."""
        access, port = self.server.access, self.server.server_port
        if access.token is None:
            return True
        if path == "/" and "token" in fields and access.has_token(fields["token"]):
            cookie = f"{access.cookie_name(port)}={access.token}; Path=/; HttpOnly; SameSite=Lax"
            self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", {
                "Set-Cookie": cookie, "Location": "/",
            })  # fmt: skip
            return False
        bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        given = access.in_cookie(self.headers.get("Cookie"), port) or bearer
        if access.has_token(given):
            return True
        self._refuse(
            HTTPStatus.FORBIDDEN,
            "open the page with the address that `dsx watch` has printed: it has a token in it",
        )
        return False

    def _answer(self, answer: Answer, fields: dict[str, str]) -> None:
        try:
            body = _text_of(answer(fields)).encode()
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        except Exception as error:  # a fault of ours, which the others' pages go on with
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, _say_fault(error))
            return
        self._send(HTTPStatus.OK, "application/json", body)

    def _say(self, text: Text) -> None:
        try:
            kind, body = text()
        except ModuleNotFoundError as error:
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, str(error))
            return
        except Exception as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, _say_fault(error))
            return
        self._send(HTTPStatus.OK, kind, body)

    def _stream(self) -> None:
        """Send the state now and when it changes, until the caller goes."""
        if not self.server.streams.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open: close some")
            return
        self.close_connection = True
        is_begun, version = False, -1
        try:
            while not self.server.is_ending:
                version, state = self.server.next_state(version)
                text = f"event: state\ndata: {_text_of(state)}\n\n"
                if not is_begun:
                    self._begin(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
                    is_begun = True
                if self.command == "HEAD":
                    break
                self.wfile.write(text.encode())
        except OSError:
            pass  # the caller has gone
        except Exception as error:  # later on it asks again, and is told then
            if not is_begun:
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, _say_fault(error))
        finally:
            self.server.streams.release()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        more = {"Allow": "GET, HEAD"} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._send(status, "text/plain; charset=utf-8", f"{why}\n".encode(), more)

    def _send(
        self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None
    ) -> None:
        headers = dict(more or {})
        takes = self.headers.get("Accept-Encoding", "") if hasattr(self, "headers") else ""
        if "gzip" in takes and len(body) > _LEAST_GZIP_BYTES:
            body = gzip.compress(body, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        self._begin(status, kind, {**headers, "Content-Length": str(len(body))})
        if getattr(self, "command", None) != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()


def _say_fault(error: Exception) -> str:
    what = f"{type(error).__name__}: {error}"
    return f"what this run's files hold could not be shown ({what}): a fault of dsx; report it"


def _text_of(found: Any) -> str:
    """Return JSON; a number that JSON does not have is a word in it."""
    try:
        return json.dumps(found, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_in_words(found), allow_nan=False, separators=(",", ":"))


def _in_words(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _in_words(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_in_words(value) for value in found]
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def _page_files() -> dict[str, tuple[str, bytes]]:
    """Return the page's files by their paths: these and no others are served."""
    found: dict[str, tuple[str, bytes]] = {}
    page = resources.files("dsx.telemetry.watch").joinpath("page")
    folders = [("/", page), ("/uplot/", page.joinpath("uplot"))]
    for place, folder in folders:
        for file in folder.iterdir():
            kind = _TYPES.get("." + file.name.rpartition(".")[2])
            if kind is not None:
                found[place + file.name] = kind, file.read_bytes()
    found["/"] = found["/index.html"]
    return found


def address_of(host: str, port: int) -> str:
    """Return HOST:PORT as an address of the web has it."""
    name = urlsplit(f"//{host}").hostname if host.startswith("[") else host
    return f"[{name}]:{port}" if ":" in (name or "") else f"{name}:{port}"
