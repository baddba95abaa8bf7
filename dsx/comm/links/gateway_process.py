"""A host's gateway as the rank that starts it sees it: a child process, told by lines of JSON.

    gateway = GatewayProcess("0.0.0.0", 29500)
    gateway.start()
    gateway.update(ranks={"rank-0.site-a.dsx": (0, "127.0.0.1", link.port)})
    ...
    gateway.stop()

A thread reads what the child says. It ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.comm.links.entrance import Limits

_MODULE = "dsx.comm.links.gateway"
_SIGNED_PREFIX = b"dsx-relay-1 registration\0"
logger = logging.getLogger(__name__)
Event = dict[str, Any]


class GatewayLost(RuntimeError):
    """The gateway's process has ended, or does not answer."""


class GatewayProcess:
    """The process that holds a host's port; safe for several threads.

    `sign` is `Keys.sign`, for registering at relays. `told` gets, in the thread that reads, what
    nobody asked for: {"event": "registered" | "unregistered" | "ended", "text": ...}. `listener` is
    one that is open already, and stays so: who calls while no gateway runs waits for the next.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: Limits | None = None,
        sign: Callable[[bytes], bytes] | None = None,
        told: Callable[[Event], object] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._host, self._port, self._listener = host, port, listener
        self._limits = limits or Limits()
        self._sign, self._told = sign, told
        self._process: subprocess.Popen[bytes] | None = None
        self._condition = threading.Condition()
        self._answers: dict[int, Event] = {}
        self._number = 0
        self._error = ""
        self._is_stopping = False
        self._reader: threading.Thread | None = None
        self._write_lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Return the child's number, None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self, deadline_seconds: float = 20.0) -> int:
        """Start it and return its port; OSError where it cannot listen, and who does if known."""
        limits = self._limits
        command = [
            sys.executable, "-m", _MODULE, "--host", self._host, "--port", str(self._port),
            "--most-connections", str(limits.most_connections),
            "--most-greeting", str(limits.most_greeting),
            "--greeting-seconds", str(limits.greeting_seconds),
        ]  # fmt: skip
        if limits.dscp is not None:
            command += ["--dscp", str(limits.dscp)]
        inherited = () if self._listener is None else (self._listener.fileno(),)
        for number in inherited:
            command += ["--listener", str(number)]
        package = str(Path(__file__).parents[3])
        path = os.environ.get("PYTHONPATH")
        environment = os.environ | {"PYTHONPATH": f"{package}:{path}" if path else package}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            start_new_session=True, pass_fds=inherited,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="dsx-gateway", daemon=True)
        self._reader.start()
        try:
            event = self._wait_for(-1, deadline_seconds)
        except GatewayLost:
            self.stop()
            raise
        if event["event"] == "error":
            self.stop()
            raise OSError(0, str(event["text"]))
        return int(event["port"])

    def update(
        self,
        ranks: Mapping[str, tuple[int, str, int]] | None = None,
        ways: Mapping[str, tuple[str, int]] | None = None,
        relays: Sequence[tuple[str, int, str]] | None = None,
        deadline_seconds: float = 10.0,
    ) -> dict[str, int]:
        """Replace what is given; returns, for each way out, the port on 127.0.0.1 to call.

        `ranks`: by name (slot, address, port); `ways`: by name the (host, port) of the gateway or
        relay that knows it; `relays`: (host, port, own member's name). ValueError if it is refused.
        """
        told: dict[str, object] = {}
        if ranks is not None:
            told["ranks"] = {
                name: {"slot": slot, "host": host, "port": port}
                for name, (slot, host, port) in ranks.items()
            }
        if ways is not None:
            told["ways"] = {n: {"host": host, "port": port} for n, (host, port) in ways.items()}
        if relays is not None:
            if relays and self._sign is None:
                raise ValueError("relays take the member's key: give GatewayProcess its `sign`")
            told["relays"] = [{"host": h, "port": p, "member": m} for h, p, m in relays]
        return self._ask(told, deadline_seconds)["ways"]

    def set_rate(self, bytes_per_second: float | None, deadline_seconds: float = 10.0) -> None:
        """Limit the payload that goes out of the host, all together; None for no limit."""
        self._ask({"bytes_per_second": bytes_per_second}, deadline_seconds)

    def counts(self, deadline_seconds: float = 10.0) -> Event:
        """Return what `Gateway.counts` says."""
        return self._ask({"counts": True}, deadline_seconds)

    def stop(self, deadline_seconds: float = 5.0) -> None:
        """End it, by force after the deadline."""
        process = self._process
        if process is None:
            return
        self._is_stopping = True
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(deadline_seconds)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(deadline_seconds)
        process.stdout.close()

    def _ask(self, told: dict[str, object], deadline_seconds: float) -> Event:
        with self._condition:
            self._number += 1
            number = self._number
        self._write({"number": number, **told})
        event = self._wait_for(number, deadline_seconds)
        if event["event"] == "refused":
            raise ValueError(str(event["text"]))
        return event

    def _write(self, line: dict[str, object]) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise GatewayLost("the gateway has not been started")
        try:
            with self._write_lock:
                process.stdin.write(json.dumps(line).encode() + b"\n")
                process.stdin.flush()
        except (OSError, ValueError) as error:
            raise GatewayLost(self._error or f"the gateway has ended: {error}") from None

    def _wait_for(self, number: int, seconds: float) -> Event:
        until = time.monotonic() + seconds
        with self._condition:
            while number not in self._answers:
                left = until - time.monotonic()
                if self._error:
                    raise GatewayLost(self._error)
                if left <= 0:
                    raise GatewayLost(f"the gateway did not answer within {seconds:.0f} s")
                self._condition.wait(left)
            return self._answers.pop(number)

    def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        for line in process.stdout:
            event: Event = json.loads(line)
            kind = event["event"]
            if kind == "sign":
                self._answer_challenge(event)
            elif kind in ("listening", "error"):
                self._answer(-1, event)
            elif kind in ("taken", "refused", "counts"):
                self._answer(event["number"], event)
            elif self._told is not None:
                self._told(event)
        status = process.wait()
        with self._condition:
            self._error = f"the gateway's process has ended, with status {status}"
            self._condition.notify_all()
        if not self._is_stopping:
            logger.error("%s: no rank of this host can be called any more", self._error)
            if self._told is not None:
                self._told({"event": "ended", "text": self._error})

    def _answer(self, number: int, event: Event) -> None:
        with self._condition:
            self._answers[number] = event
            self._condition.notify_all()

    def _answer_challenge(self, event: Event) -> None:
        """Sign what registers at a relay, and nothing else."""
        data = bytes.fromhex(event["data"])
        if self._sign is None or not data.startswith(_SIGNED_PREFIX):
            logger.error("the gateway asks for a signature of what registers nothing: refused")
            return
        signature = self._sign(data)
        with contextlib.suppress(GatewayLost):
            self._write({"signed": event["number"], "signature": signature.hex()})
