"""A line's latency where the kernel has no netem: frames between interfaces, handed on later.

    python forwarder.py SECONDS INTERFACE INTERFACE ...

A switch in one process, run inside the namespace that the interfaces end in: what comes in at one
leaves at the one that its address was seen at, or at all others, SECONDS after the kernel has
stamped it. All frames wait equally long, so one queue holds them in order. Rates are not its
business: `tc tbf` shapes what enters and what leaves.

It says `ready` when all interfaces are open, and ends when its standard input does, which is when
whoever has started it lets go or dies; then it writes its counts as one line of JSON. Frames beyond
`QUEUE_BYTES`, and those that an interface's own queue refuses, are dropped and counted, as on any
line. Only the standard library, so that it starts from its path. It needs Linux and CAP_NET_RAW.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

QUEUE_BYTES = 64 * 2**20  # what a line of 1 Gbit/s holds in half a second
_BURST = 64  # frames of one interface before the others have their turn
_MOST_BYTES = 10 + 65_550  # of a frame that was not cut in segments, and its header
_SOL_PACKET, _ETH_P_ALL = 263, 0x0003  # linux/if_packet.h and if_ether.h
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 15, 23
_SO_TIMESTAMPNS = 35
_VNET_BYTES = 10  # before each frame: where the sender's kernel has left the checksum to be made
_NICENESS = -15


@dataclass
class Counts:
    """What has passed; `latest_seconds`: the longest that a frame left after its time."""

    frames: int = 0
    dropped: int = 0
    most_bytes: int = 0
    latest_seconds: float = 0.0


class Forwarder:
    """Hands on frames between ports, sockets of messages, `latency_seconds` later."""

    def __init__(
        self,
        latency_seconds: float,
        ports: Sequence[socket.socket],
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.counts = Counts()
        self._latency_seconds = latency_seconds
        self._ports = ports
        self._queue_bytes = queue_bytes
        self._seen_at: dict[bytes, socket.socket] = {}  # hardware addresses
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self._waiting_bytes = 0

    def run(self, until: int) -> None:
        """Forward until the file descriptor `until` can be read, or is at its end."""
        while True:
            timeout = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            readable: set[int | socket.socket]
            readable = set(select.select([until, *self._ports], [], [], timeout)[0])
            if until in readable:
                return
            for port in self._ports:
                if port in readable:
                    self._take_in(port)
            self._hand_on()

    def _take_in(self, port: socket.socket) -> None:
        """Queue what has come in at one interface."""
        for _ in range(_BURST):
            try:
                frame, ancillary, _, _ = port.recvmsg(_MOST_BYTES, 64)
            except (BlockingIOError, InterruptedError):
                return
            if self._waiting_bytes + len(frame) > self._queue_bytes:
                self.counts.dropped += 1
                continue
            self._seen_at[frame[_VNET_BYTES + 6 : _VNET_BYTES + 12]] = port
            age = min(max(0.0, time.time() - _stamp(ancillary)), self._latency_seconds)
            due = time.monotonic() + self._latency_seconds - age
            if self._waiting:  # the wall clock may have been set
                due = max(due, self._waiting[-1][0])
            self._waiting.append((due, port, frame))
            self._waiting_bytes += len(frame)
            self.counts.most_bytes = max(self.counts.most_bytes, self._waiting_bytes)

    def _hand_on(self) -> None:
        """Send what has waited long enough."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            due, came_from, frame = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            self.counts.latest_seconds = max(self.counts.latest_seconds, now - due)
            target = self._seen_at.get(frame[_VNET_BYTES : _VNET_BYTES + 6])
            targets = self._ports if target is None else [target]
            for port in targets:
                if port is not came_from:
                    self._send(port, frame)

    def _send(self, port: socket.socket, frame: bytes) -> None:
        try:
            port.send(frame)
            self.counts.frames += 1
        except OSError:  # its queue is full, or the cluster's end is down
            self.counts.dropped += 1


def open_interface(name: str) -> socket.socket:
    """Return a packet socket that sees what comes in at an interface, and sends there.

    OSError if there is none of that name in this namespace, or packet sockets are refused.
    """
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    for option in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
        port.setsockopt(socket.SOL_SOCKET, option, QUEUE_BYTES)
    port.setblocking(False)
    port.bind((name, _ETH_P_ALL))
    return port


def _stamp(ancillary: Sequence[tuple[int, int, bytes]]) -> float:
    """Return when the kernel has received a frame, in seconds since the epoch."""
    for _, kind, data in ancillary:
        if kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = struct.unpack("@ll", data)
            return seconds + 1e-9 * nanoseconds
    return time.time()


def main(arguments: Sequence[str]) -> None:
    """Forward until standard input ends; see the module."""
    ports = [open_interface(name) for name in arguments[1:]]
    forwarder = Forwarder(float(arguments[0]), ports)
    os.nice(_NICENESS - os.nice(0))  # a frame's time has come, whatever else runs
    print("ready", flush=True)
    try:
        forwarder.run(sys.stdin.fileno())
    finally:
        print(json.dumps(asdict(forwarder.counts)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
