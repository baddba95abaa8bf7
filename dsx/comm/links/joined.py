"""Two connections joined: what comes on one goes out on the other, by splice, never looked at.

Bytes go from socket to pipe to socket inside the kernel. A direction holds a pipe only while there
are bytes in it. The end of one direction is passed on as such, and the other goes on as long as
something comes (30 s); an error ends both. What goes out of
the site is paid for from a bucket of bytes, if there is a rate.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import Callable

from dsx.comm.links.event_loop import BROKEN, FAILED, READ, WRITE, EventLoop, close_number

_PIPE_BYTES = 1 << 20  # under CURVE half the cost of 64 and of 256 KiB; all that anybody may have
_LEAST_BYTES = 1 << 16  # of a turn's read, for another to be tried in the same turn
_TURN_BYTES = 1 << 21
_MOST_SPARE_PIPES = 64
_F_SETPIPE_SZ = 1031
_BURST_SECONDS = 0.1
_LEAST_BURST_BYTES = 4096
_SEGMENT_BYTES = 1448  # of payload in an Ethernet frame: less is not worth one
_SHARES = 8  # of what the bucket holds, one to each that waits
_LOOK_SECONDS = 0.01
_HALF_SECONDS = 30.0
_FLAGS = 3  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK


class Pipes:
    """Pipes that are empty, kept for whoever needs one next."""

    def __init__(self) -> None:
        self._spare: list[tuple[int, int]] = []

    def borrow(self) -> tuple[int, int]:
        """Return an empty pipe's ends, to read and to write."""
        if self._spare:
            return self._spare.pop()
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # beyond what this user may have: it stays at 64 KiB
            fcntl.fcntl(ends[1], _F_SETPIPE_SZ, _PIPE_BYTES)
        return ends

    def give_back(self, ends: tuple[int, int], is_empty: bool = True) -> None:
        """Keep a pipe for the next, or close it."""
        if is_empty and len(self._spare) < _MOST_SPARE_PIPES:
            self._spare.append(ends)
        else:
            close_number(ends[0])
            close_number(ends[1])


class Bucket:
    """A rate for all that goes out, in bytes per second of payload; None for no limit.

    Holds what 0.1 s bring. Those that find it empty wait in the order in which they came.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._rate: float | None = None
        self._level = 0.0
        self._at = time.monotonic()
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_due = False
        self._is_turn = False

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Change the rate, at once and for all."""
        self._fill()
        self._rate = bytes_per_second
        self._level = min(self._level, self._burst)
        self._serve()

    @property
    def _burst(self) -> float:
        return max((self._rate or 0.0) * _BURST_SECONDS, _LEAST_BURST_BYTES)

    def take(self, most: int) -> int:
        """Return how many bytes may go out now, at most so many; 0 before those who wait."""
        if self._rate is None:
            return most
        self._fill()
        if self._level < _SEGMENT_BYTES or (self._waiting and not self._is_turn):
            return 0
        self._is_turn = False
        taken = min(most, int(self._level), max(_SEGMENT_BYTES, int(self._burst / _SHARES)))
        self._level -= taken
        return taken

    def give_back(self, num_bytes: int) -> None:
        """Return what was taken and not used."""
        if self._rate is not None:
            self._level += num_bytes

    def wait(self, call: Callable[[], object]) -> None:
        """Call when it is one's turn to take."""
        self._waiting.append(call)
        if not self._is_due:
            self._is_due = True
            self._loop.after(_LOOK_SECONDS, self._serve_when_due)

    def _serve_when_due(self) -> None:
        self._is_due = False
        self._serve()
        if self._waiting and not self._is_due:
            self._is_due = True
            self._loop.after(_LOOK_SECONDS, self._serve_when_due)

    def _fill(self) -> None:
        now = time.monotonic()
        if self._rate is not None:
            self._level = min(self._level + (now - self._at) * self._rate, self._burst)
        self._at = now

    def _serve(self) -> None:
        self._fill()
        while self._waiting and (self._rate is None or self._level >= _SEGMENT_BYTES):
            self._is_turn = True
            self._waiting.popleft()()
        self._is_turn = False


class _Direction:
    """From one socket to the other."""

    __slots__ = ("bucket", "held", "is_at_end", "is_parked", "num_bytes", "pipe", "sink", "source")

    def __init__(self, source: socket.socket, sink: socket.socket, bucket: Bucket | None) -> None:
        self.source, self.sink, self.bucket = source, sink, bucket
        self.pipe: tuple[int, int] | None = None
        self.held = 0
        self.num_bytes = 0
        self.is_at_end = False
        self.is_parked = False


class Joined:
    """Two sockets that do not block, owned from now on; `ended` is called once, with this.

    `bucket` pays for what is sent on `outside`, and on `inside` too if `pays_both`, as in a relay.
    """

    def __init__(
        self,
        loop: EventLoop,
        pipes: Pipes,
        outside: socket.socket,
        inside: socket.socket,
        bucket: Bucket,
        ended: Callable[[Joined], object],
        pays_both: bool = False,
    ) -> None:
        self._loop, self._pipes, self._ended = loop, pipes, ended
        self.outside, self.inside = outside, inside
        self._in = _Direction(outside, inside, bucket if pays_both else None)
        self._out = _Direction(inside, outside, bucket)
        self._is_open = True
        self._interest: dict[int, int] = {}
        for ours, theirs in ((outside, inside), (inside, outside)):
            self._interest[ours.fileno()] = READ
            loop.watch(ours.fileno(), READ, self._callback(ours, theirs))

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Return how many bytes have come in from outside, and gone out."""
        return self._in.num_bytes, self._out.num_bytes

    def close(self) -> None:
        """End both connections."""
        if not self._is_open:
            return
        self._is_open = False
        for each in (self.outside, self.inside):
            self._loop.forget(each.fileno())
            each.close()
        for direction in (self._in, self._out):
            if direction.pipe is not None:
                self._pipes.give_back(direction.pipe, is_empty=direction.held == 0)
                direction.pipe = None
        self._ended(self)

    def _callback(self, ours: socket.socket, theirs: socket.socket) -> Callable[[int], object]:
        from_here, to_here = (
            (self._in, self._out) if ours is self.outside else (self._out, self._in)
        )

        def look(events: int) -> None:
            if events & FAILED:  # reset, or silent for too long: there is no more to come
                self.close()
                return
            if events & (WRITE | BROKEN) and to_here.held:
                self._move(to_here)
            if self._is_open and events & (READ | BROKEN) and not from_here.held:
                self._move(from_here)
            if self._is_open and events & BROKEN and from_here.is_at_end and to_here.is_at_end:
                self.close()

        return look

    def _move(self, direction: _Direction) -> None:
        """Move what there is, at most a turn's share, and then wait for what is next."""
        try:
            left = _TURN_BYTES
            while left > 0 and not direction.is_parked:
                if not direction.held:
                    num_read = self._fill(direction)
                    if not num_read:
                        break
                    if num_read < _LEAST_BYTES:
                        left = 0
                num_sent = self._drain(direction)
                left -= num_sent
                if direction.held:
                    break
        except OSError:  # either of them is broken: so is what goes through
            self.close()
            return
        if self._in.is_at_end and self._out.is_at_end and not (self._in.held or self._out.held):
            self.close()
        else:
            self._wait()

    def _fill(self, direction: _Direction) -> int:
        """Read into a pipe; 0 if there is nothing, or it may not be sent yet."""
        if direction.is_at_end:
            return 0
        most = _PIPE_BYTES
        if direction.bucket is not None:
            most = direction.bucket.take(_PIPE_BYTES)
            if not most:
                direction.is_parked = True
                direction.bucket.wait(lambda: self._resume(direction))
                return 0
        pipe = self._pipes.borrow()
        num_read = 0
        try:
            num_read = os.splice(direction.source.fileno(), pipe[1], most, flags=_FLAGS)
            direction.is_at_end = num_read == 0
        except BlockingIOError:
            pass
        finally:
            if direction.bucket is not None:
                direction.bucket.give_back(most - num_read)
            if num_read:
                direction.pipe, direction.held = pipe, num_read
            else:
                self._pipes.give_back(pipe)
        if direction.is_at_end:
            direction.sink.shutdown(socket.SHUT_WR)
            self._look_at_half(-1)
        return num_read

    def _drain(self, direction: _Direction) -> int:
        """Send from the pipe; gives it back when it is empty."""
        assert direction.pipe is not None
        try:
            reader = direction.pipe[0]
            num_sent = os.splice(reader, direction.sink.fileno(), direction.held, flags=_FLAGS)
        except BlockingIOError:
            return 0
        direction.held -= num_sent
        direction.num_bytes += num_sent
        if not direction.held:
            self._pipes.give_back(direction.pipe)
            direction.pipe = None
        return num_sent

    def _resume(self, direction: _Direction) -> None:
        if self._is_open:
            direction.is_parked = False
            self._move(direction)

    def _look_at_half(self, before: int) -> None:
        """Close what has one end left, once nothing has moved for a while."""
        if self._is_open:
            num = sum(self.num_bytes)
            if num == before:
                self.close()
            else:
                self._loop.after(_HALF_SECONDS, lambda: self._look_at_half(num))

    def _wait(self) -> None:
        for from_here, to_here in ((self._in, self._out), (self._out, self._in)):
            number = from_here.source.fileno()
            is_full = from_here.held or from_here.is_at_end or from_here.is_parked
            wanted = (0 if is_full else READ) | (WRITE if to_here.held else 0)
            if wanted != self._interest[number]:
                self._interest[number] = wanted
                self._loop.change(number, wanted)
