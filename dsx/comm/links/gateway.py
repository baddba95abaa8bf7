"""The one port of a host: hands each connection that comes in to the right rank of the host.

    python -m dsx.comm.links.gateway --host 0.0.0.0 --port 29500

A process of its own, started by one rank (gateway_process.py), which tells it by stdin who is
where (gateway_table.py) and hears from it by stdout, a JSON object a line. It ends with that rank,
and only then: signals for a whole job leave it, as the ranks save what they have through it.

It cannot read what it forwards, which is encrypted from rank to rank, and holds no key. What it is
called for is told before that (greetings.py): a slot by libzmq, a name by another gateway. Nothing
but what is in its table is ever connected to. For a site that can only call out it registers at
relays (relay_site.py) and opens ways out (ways.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter, deque
from typing import Any

from dsx.comm.links import greetings
from dsx.comm.links.entrance import Caller, Entrance, Limits
from dsx.comm.links.event_loop import READ, WRITE, EventLoop
from dsx.comm.links.gateway_table import (
    MOST_LINE_BYTES,
    Place,
    Rank,
    RelayPlace,
    Told,
    read_line,
)  # fmt: skip
from dsx.comm.links.greetings import ToName, ToSlot, Wanted, greet_zmtp_or_socks, socks_reply
from dsx.comm.links.joined import Bucket, Joined, Pipes
from dsx.comm.links.relay_site import Registration
from dsx.comm.links.tcp import Dial, listen
from dsx.comm.links.ways import Way
from dsx.comm.open_files import raise_file_limit

_LOOK_SECONDS = 0.5
_WAY_SECONDS = 10.0
_MOST_UNREAD_BYTES = 4 << 20


class Gateway:
    """What is listened on, who is where, and what is joined; `emit` tells the rank."""

    def __init__(self, loop: EventLoop, listener: socket.socket, limits: Limits, emit: Any) -> None:
        self._loop, self._limits, self._emit = loop, limits, emit
        self._entrance = Entrance(loop, listener, limits, greet_zmtp_or_socks, self._wanted)
        self._ranks: dict[str, Rank] = {}
        self._ways: dict[str, Way] = {}
        self._relays: list[RelayPlace] = []
        self._registrations: list[Registration] = []
        self._joined: set[Joined] = set()
        self._num_dialling = 0
        self._pipes, self._bucket = Pipes(), Bucket(loop)
        self._to_sign: dict[int, Any] = {}
        self._num_signed = 0
        self._bytes = Counter[str]()

    def take(self, told: Told) -> None:
        """Bring everything up to what the rank has told, and say so."""
        ranks_before = self._ranks
        if told.ranks is not None:
            self._ranks = told.ranks
        if told.ways is not None:
            self._set_ways(told.ways)
        if told.relays is not None or self._ranks != ranks_before:
            self._relays = self._relays if told.relays is None else told.relays
            for registration in self._registrations:
                registration.stop()
            self._registrations = [r for relay in self._relays if (r := self._register(relay))]
        if told.sets_rate:
            self._bucket.set_rate(told.bytes_per_second)
        if told.signed is not None:
            done = self._to_sign.pop(told.signed, None)
            if done is not None:
                done(told.signature)
            return
        if told.asks_counts:
            self._emit(event="counts", number=told.number, **self.counts())
            return
        ports = {name: way.port for name, way in self._ways.items()}
        self._emit(event="taken", number=told.number, ways=ports)

    def counts(self) -> dict[str, object]:
        """Return how many connections and bytes there are and were, and why others were refused."""
        totals = Counter(self._bytes)
        for joined in self._joined:
            totals["in"] += joined.num_bytes[0]
            totals["out"] += joined.num_bytes[1]
        return {
            "joined": len(self._joined),
            "joined_ever": self._bytes["joined"],
            "greeting": self._entrance.num_open,
            "bytes_in": totals["in"],
            "bytes_out": totals["out"],
            "refused": dict(self._entrance.counts),
            "ways": {name: dict(way.failures) for name, way in self._ways.items()},
        }

    def close(self) -> None:
        """End all connections."""
        self._entrance.close()
        for way in self._ways.values():
            way.close()
        for registration in self._registrations:
            registration.stop()
        for joined in [*self._joined]:
            joined.close()

    def _set_ways(self, wanted: dict[str, Place]) -> None:
        for name, way in [*self._ways.items()]:
            if wanted.get(name) != way.place:
                self._ways.pop(name).close()
        for name, place in wanted.items():
            if name not in self._ways:
                self._ways[name] = Way(
                    self._loop, name, place, _WAY_SECONDS, self._limits.dscp,
                    lambda: not self._is_full(), self._join,
                )  # fmt: skip

    def _register(self, relay: RelayPlace) -> Registration | None:
        """Have a relay know the ranks of its member that are here, if there are any."""
        mine = {n: r for n, r in self._ranks.items() if n.endswith(f".{relay.member}.dsx")}
        if not mine:
            return None
        return Registration(
            self._loop, relay, mine, self._sign, self._join_if_room,
            lambda event, text: self._emit(event=event, text=text),
            self._limits.dscp, self._limits.greeting_seconds,
        )  # fmt: skip

    def _sign(self, data: bytes, done: Any) -> None:
        """Have the rank sign; whoever asks has a deadline."""
        self._num_signed += 1
        self._to_sign = {k: v for k, v in self._to_sign.items() if k > self._num_signed - 64}
        self._to_sign[self._num_signed] = done
        self._emit(event="sign", number=self._num_signed, data=data.hex())

    def _is_full(self) -> bool:
        num_reaching = sum(way.num_open for way in self._ways.values())
        num = len(self._joined) + self._num_dialling + num_reaching
        return num >= self._limits.most_connections

    def _wanted(self, caller: Caller, wanted: Wanted) -> None:
        """Connect to the rank that a caller wants, if there is one."""
        rank: Rank | None = None
        if isinstance(wanted, ToSlot):
            rank = next((r for r in self._ranks.values() if r.slot == wanted.slot), None)
        elif isinstance(wanted, ToName):
            rank = self._ranks.get(wanted.name)
        is_socks = isinstance(wanted, ToName)
        if rank is None:
            caller.refuse(
                "no such rank here", socks_reply(greetings.NOT_ALLOWED) if is_socks else b""
            )
            return
        if self._is_full():
            caller.refuse(
                "too many connections", socks_reply(greetings.FAILED) if is_socks else b""
            )
            return
        self._num_dialling += 1
        first = wanted.first if isinstance(wanted, ToSlot) else b""

        def dialled(inside: socket.socket | None, error: OSError | None) -> None:
            self._num_dialling -= 1
            if inside is None:
                why = error.strerror if error is not None else ""
                answer = _reply(wanted, greetings.NOT_THERE)
                caller.refuse(f"the rank does not answer: {why}", answer)
            elif not caller.is_open:
                inside.close()
            else:
                outside = caller.take()
                try:
                    outside.send(_reply(wanted, greetings.JOINED))
                    inside.send(first)
                except OSError:
                    outside.close()
                    inside.close()
                    return
                self._join(outside, inside)

        place = rank.place
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        address = (place.host, place.port)
        Dial(self._loop, [(family, address)], self._limits.greeting_seconds, dialled)

    def _join_if_room(self, outside: socket.socket, inside: socket.socket) -> None:
        if self._is_full():
            self._entrance.counts["too many connections"] += 1
            outside.close()
            inside.close()
        else:
            self._join(outside, inside)

    def _join(self, outside: socket.socket, inside: socket.socket) -> None:
        joined = Joined(self._loop, self._pipes, outside, inside, self._bucket, self._ended)
        self._joined.add(joined)
        self._bytes["joined"] += 1

    def _ended(self, joined: Joined) -> None:
        self._joined.discard(joined)
        num_in, num_out = joined.num_bytes
        self._bytes["in"] += num_in
        self._bytes["out"] += num_out
        for registration in self._registrations:
            registration.look()


def _reply(wanted: Wanted, code: int) -> bytes:
    """Return what a caller is told; libzmq's hears nothing but what the rank says."""
    return socks_reply(code) if isinstance(wanted, ToName) else b""


class Lines:
    """Lines of JSON from stdin and to stdout, of which neither is waited for."""

    def __init__(self, loop: EventLoop, source: int, sink: int) -> None:
        self._loop, self._source, self._sink = loop, source, sink
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._read = b""
        self._unwritten: deque[bytes] = deque()
        self._num_unwritten = 0
        self.taken: Any = None
        loop.watch(source, READ, self._look)

    def emit(self, **event: object) -> None:
        """Write an event; the process ends if the rank reads none for long."""
        line = json.dumps(event).encode() + b"\n"
        self._unwritten.append(line)
        self._num_unwritten += len(line)
        if self._num_unwritten > _MOST_UNREAD_BYTES:
            self._loop.stop()
        if len(self._unwritten) == 1:
            self.flush(0)

    def flush(self, events: int) -> None:
        """Write as much as is taken."""
        try:
            while self._unwritten:
                line = self._unwritten[0]
                num = os.write(self._sink, line)
                self._num_unwritten -= num
                if num == len(line):
                    self._unwritten.popleft()
                else:
                    self._unwritten[0] = line[num:]
            self._loop.forget(self._sink)
        except BlockingIOError:
            if not events:
                self._loop.watch(self._sink, WRITE, self.flush)
        except OSError:  # nobody is there any more
            self._loop.stop()

    def _look(self, events: int) -> None:
        try:
            data = os.read(self._source, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            try:
                told = read_line(line)
                self.taken(told)
            except (ValueError, OSError) as error:
                self.emit(event="refused", number=_number_in(line), text=str(error))
        if not data or len(self._read) > MOST_LINE_BYTES:
            self._loop.stop()


def _number_in(line: bytes) -> int:
    with contextlib.suppress(ValueError, RecursionError):
        told: Any = json.loads(line)
        if isinstance(told, dict) and isinstance(told.get("number"), int):
            return told["number"]
    return 0


def _look_for_parent(loop: EventLoop, parent: int) -> None:
    """End with the process that started this one, even if a child of its holds stdin open."""
    if os.getppid() != parent:
        loop.stop()
    loop.after(_LOOK_SECONDS, lambda: _look_for_parent(loop, parent))


def main(arguments: list[str]) -> int:
    """Serve until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dsx.comm.links.gateway")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--listener", type=int, default=None, help="a listening socket's number")
    parser.add_argument("--most-connections", type=int, default=Limits.most_connections)
    parser.add_argument("--most-greeting", type=int, default=Limits.most_greeting)
    parser.add_argument("--greeting-seconds", type=float, default=Limits.greeting_seconds)
    parser.add_argument("--dscp", type=int, default=None)
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        limits = Limits(
            given.most_connections, given.most_greeting, given.greeting_seconds, given.dscp
        )
        raise_file_limit(limits.most_files, f"{limits.most_connections} connections")
        loop = EventLoop()
        lines = Lines(loop, sys.stdin.fileno(), sys.stdout.fileno())
        if given.listener is None:
            listener = listen(given.host, given.port, limits.dscp)
        else:
            listener = socket.socket(fileno=given.listener)
    except (ValueError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sys.stdout.write(json.dumps({"event": "error", "text": text}) + "\n")
        return 2
    gateway = Gateway(loop, listener, limits, lines.emit)
    lines.taken = gateway.take
    _look_for_parent(loop, os.getppid())
    lines.emit(event="listening", port=listener.getsockname()[1])
    loop.run()
    gateway.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
