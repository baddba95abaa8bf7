"""Where a notice goes, once: an address of the web that it is posted to, or a command.

An address is a secret: who knows that of a Slack channel writes there. So nothing here shows more
of it than scheme and host. Certificates are verified, and no redirect is followed, which could
carry the notice to where nobody has sent it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from email.message import Message
from http.client import HTTPException
from typing import IO, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dsx.telemetry.notices.notice import Form, Notice

_TOO_EARLY = (408, 425, 429)  # of what a server refuses, what it may take later
_LONGEST_WAIT = 600.0
_MOST_SHOWN = 200  # letters of what a command says


class Undelivered(Exception):
    """A notice that did not arrive, in words without secrets.

    `may_retry`: it may later, after `wait_seconds` where the other side has named a time.
    """

    def __init__(self, why: str, may_retry: bool, wait_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.may_retry, self.wait_seconds = may_retry, wait_seconds


class Hook(Protocol):
    """One place that notices go to; `name` is shown."""

    name: str

    def deliver(self, notice: Notice, seconds: float) -> None:
        """Deliver it, within about so many seconds; Undelivered."""
        ...


def require_web_address(url: str) -> None:
    """Raise ValueError, which does not show it, for what nothing can be posted to."""
    why = ""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        if not is_web:
            why = "is no address that begins with https:// (or http://) and a host"
        elif not url.isascii() or not url.isprintable() or " " in url:
            why = "has letters that no address has, such as a space or the end of a line"
        elif not _is_a_host(str(parts.hostname)):
            why = "has a host that is none: an empty part, or one of more than 63 letters"
        elif parts.username or parts.password:
            why = "has a user or password before its host, which is not sent; use a command (curl)"
    except ValueError:  # brackets that do not close, a port beyond 65535
        why = "has a host or a port that cannot be read"
    if why:
        raise ValueError(
            f"{why} (it is not shown here, as it may be a secret); write, for example, "
            '"https://hooks.example.org/dsx"'
        )


def _is_a_host(name: str) -> bool:
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def shown_address(url: str) -> str:
    """Return scheme and host of an address, and nothing else of it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}/..."


class Webhook:
    """An address that each notice is posted to."""

    def __init__(self, url: str, form: Form) -> None:
        require_web_address(url)
        self.name = shown_address(url)
        self._url = url
        self._form: Form = form
        self._opener = build_opener(_StaysHere)

    def deliver(self, notice: Notice, seconds: float) -> None:
        """Post it; an answer of 200 to 299 says that it has come."""
        headers = {"Content-Type": "application/json", "User-Agent": "dsx"}
        request = Request(self._url, notice.body(self._form), headers, method="POST")
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                answer.read(1)
        except HTTPError as error:
            with error:
                raise _refused(error) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise Undelivered(why, may_retry=True) from None


class _StaysHere(HTTPRedirectHandler):
    """Takes a redirect for the answer that it is."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Go nowhere else."""


def _refused(error: HTTPError) -> Undelivered:
    """Return what an answer that is no success means."""
    told = f"it answered {error.code}" + (f" {error.reason}" if error.reason else "")
    if 300 <= error.code < 400:
        told += ", a redirect, and none is followed: give the address that it leads to"
    wait, later = 0.0, error.headers.get("Retry-After", "")
    if later.isascii() and later.isdigit():
        wait = min(float(later), _LONGEST_WAIT)
    return Undelivered(told, error.code >= 500 or error.code in _TOO_EARLY, wait)


class Command:
    """A command, without a shell: the notice as JSON on its standard input, 0 for success.

    `NOTICE_KIND` and `NOTICE_TEXT` in its environment say the same to one that reads no JSON.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.name = f"the command {os.path.basename(words[0])}"
        self._words = [*words]

    def deliver(self, notice: Notice, seconds: float) -> None:
        """Run it; what takes longer than so many seconds is killed, with what it has started."""
        text = notice.sentence.replace("\0", " ")
        environment = {**os.environ.copy(), "NOTICE_KIND": notice.kind, "NOTICE_TEXT": text}
        try:
            run = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, env=environment, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise Undelivered(f"it cannot be run: {why}", may_retry=False) from None
        try:
            _, said = run.communicate(notice.body("json"), seconds)
        except subprocess.TimeoutExpired:
            if run.poll() != 0:  # else it has done it, and left something that runs on
                raise Undelivered(f"it took longer than {seconds:.0f} s", may_retry=True) from None
            said = b""
            _kill_group(run)
        finally:
            _end(run)
        if run.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            told = f": {lines[-1][:_MOST_SHOWN]}" if lines else ""
            raise Undelivered(f"its exit status is {run.returncode}{told}", may_retry=True)


def _kill_group(run: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)


def _end(run: subprocess.Popen[bytes]) -> None:
    """Kill a command that has not ended, and all that it has started and that is of its group."""
    if run.poll() is None:
        _kill_group(run)
        run.wait()
    for pipe in (run.stdin, run.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
