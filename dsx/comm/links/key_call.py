"""A call to whichever cluster has a port, with a member's key alone: for a tool without the JSON.

Whoever calls holds one member's secret and everybody's public keys, and knows no cluster's number:
it tries all keys at once, and leaves the sender of its frames to its key (`BY_KEY`). Whose key has
answered is whose cluster it is. For one thread, which waits no longer than it says.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from dsx.comm.links import sockets
from dsx.comm.links.frames import ANSWER, ASK, BY_KEY, HELLO, PROBE, BadFrame, Frame
from dsx.comm.links.hello import Hello
from dsx.comm.links.keys import Keys
from dsx.comm.links.peer import FIRST_VISITOR

_STEP_SECONDS = 0.1
_GREETING_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_ZMTP_BYTES, _MECHANISM = 64, slice(12, 32)  # of a greeting (RFC 23)


class NoAnswer(Exception):
    """Nobody answers there, or no more; the text says why, and `fix` what to do, if anything.

    `is_refusal`: somebody does, and will not have this call.
    """

    def __init__(self, text: str, fix: str = "", is_refusal: bool = False) -> None:
        super().__init__(text)
        self.fix, self.is_refusal = fix, is_refusal


@dataclass(frozen=True)
class Met:
    """Who has answered: a member, by its key, and its cluster, as it says."""

    name: str
    cluster: int


class _Own:
    """The own keys, as a socket takes them."""

    def __init__(self, keys: Keys) -> None:
        self.public_key, self.secret_key = keys.curve_public, keys.curve_secret


class KeyCall:
    """A call to `address`, HOST:PORT, as a visitor of number `rank`; NoAnswer if nobody answers.

    `is_over` is looked at while it waits: once true, waiting ends.
    """

    def __init__(
        self,
        keys: Keys,
        address: str,
        rank: int,
        seconds: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        assert rank >= FIRST_VISITOR
        self.address, self._rank, self._keys, self._is_over = address, rank, keys, is_over
        self._context: zmq.Context[Any] = zmq.Context()
        self._number = 0
        try:
            members = [(n, key) for n in keys.names() for key in keys.curve_keys_of(n)]
            _, _, member = self._shake_hands(members, seconds)
            self.close()  # and anew with that key alone: beside others libzmq may lose frames
            self._context = zmq.Context()
            self._socket, self._monitor, member = self._shake_hands([member], seconds)
            self.met = Met(member[0], self._greet())
        except BaseException:
            self.close()
            raise

    def ask(self, body: bytes, seconds: float) -> bytes:
        """Return the answer to a request; NoAnswer if the call has ended, or after `seconds`."""
        self._number += 1
        self._say(Frame(ASK, BY_KEY, serial=self._number), body)
        for frame, answer in self._frames(seconds):
            if frame.kind == ANSWER and frame.serial == self._number:
                return bytes(answer)
        raise NoAnswer(f"it has not answered within {seconds:g} s")

    def close(self) -> None:
        """End the call."""
        self._context.destroy(0)

    def _shake_hands(
        self, members: list[tuple[str, bytes]], seconds: float
    ) -> tuple[Any, Any, tuple[str, bytes]]:
        """Call with each of these keys; return the sockets of the one that stands, and whose."""
        until, has_keys = time.monotonic() + seconds, False
        while True:
            stands, all_failed = self._try(members, until)
            if stands is not None:
                return stands
            mechanism = None if self._is_over() else mechanism_at(self.address)
            if has_keys or mechanism != "CURVE" or not all_failed:
                raise self._nobody(mechanism, is_final=has_keys)
            has_keys = True  # a gateway may have had no rank for the calls: once more, now it has
            self.close()
            self._context = zmq.Context()

    def _try(
        self, members: list[tuple[str, bytes]], until: float
    ) -> tuple[tuple[Any, Any, tuple[str, bytes]] | None, bool]:
        """Return what stands, if anything; and whether each call has been broken off."""
        calls: dict[Any, tuple[Any, tuple[str, bytes]]] = {}
        poller, own = zmq.Poller(), _Own(self._keys)
        for name, key in members:
            called = sockets.call(self._context, (self.address, 0), own, key)  # type: ignore[arg-type]
            calls[called[1]] = called[0], (name, key)
            poller.register(called[1], zmq.POLLIN)
        failed = set[Any]()
        while time.monotonic() < until and not self._is_over() and len(failed) < len(calls):
            for monitor in dict(poller.poll(int(1000 * _STEP_SECONDS))):
                for event in _events(monitor):
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        return (calls[monitor][0], monitor, calls[monitor][1]), False
                    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                        raise self._not_taken(calls[monitor][1][0])
                    if event in (
                        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                    ):  # fmt: skip
                        failed.add(monitor)
        return None, len(failed) == len(calls)

    def _not_taken(self, name: str) -> NoAnswer:
        own = self._keys.name
        return NoAnswer(
            f"{name} at {self.address} does not take the key of {own} in {self._keys.directory}: "
            f"it is no member's there, or has been revoked",
            f"have {name} add the line that `dsx keys list` shows here: dsx keys add LINE",
            is_refusal=True,
        )

    def _nobody(self, mechanism: str | None, is_final: bool) -> NoAnswer:
        """Say why no key has led to anybody; `is_final`: all were tried where one could."""
        if mechanism == "NULL":
            return NoAnswer(
                f'who answers at {self.address} uses no keys: a run of link.security "none" hands '
                "its records to nobody, as whoever reaches the port could have them",
                'give the run "security": "curve" and keys, or watch its folder over ssh -L',
                is_refusal=True,
            )
        if mechanism is None:
            return NoAnswer(
                f"nobody listens at {self.address}, or the port is closed on the way",
                "is the run on? give HOST:PORT of a member in link.members",
            )
        if mechanism != "CURVE":
            what = "is no link" if mechanism else "hangs up: a gateway without ranks, or no link"
            return NoAnswer(
                f"who listens at {self.address} {what}",
                "is the run on? give HOST:PORT of a member in link.members",
                is_refusal=bool(mechanism),
            )
        if not is_final:
            return NoAnswer(
                f"who listens at {self.address} did not come to an end with a handshake"
            )
        names, folder = ", ".join(self._keys.names()), self._keys.directory
        return NoAnswer(
            f"who listens at {self.address} has none of the keys in {folder}/members ({names})",
            "give HOST:PORT of link.members, and --keys FOLDER of this run's members",
            is_refusal=True,
        )

    def _greet(self) -> int:
        """Greet, and return the cluster that answers."""
        hello = Hello(self._rank, 0, 1, time.time_ns())
        self._say(Frame(HELLO, BY_KEY), hello.pack())
        for frame, body in self._frames(_GREETING_SECONDS):
            if frame.kind == HELLO:
                return self._greeted(frame.sender, Hello.read(bytes(body)))
        raise NoAnswer(
            f"a link answers at {self.address}, but no greeting of a tool without the run's JSON",
            "it may run an earlier dsx: that has to be the one of this host",
        )

    def _greeted(self, cluster: int, answer: Hello) -> int:
        if answer.over:
            raise NoAnswer("it has given an earlier call of this one up; calling again")
        if answer.rank:
            raise NoAnswer(
                f"rank {answer.rank} of cluster {cluster} answers at {self.address}",
                "records are with a cluster's first rank: give its address in link.members",
            )
        return cluster

    def _say(self, frame: Frame, body: bytes) -> None:
        try:
            self._socket.send(frame.pack(len(body)) + body, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise NoAnswer("its connection was closed") from error

    def _frames(self, seconds: float) -> Iterator[tuple[Frame, memoryview]]:
        """Yield what comes, for so long; probes are sent back."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_over():
            ready = dict(poller.poll(int(1000 * _STEP_SECONDS)))
            if self._socket in ready:
                try:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:  # what was there has been dropped
                    continue
                try:
                    frame, body = Frame.of([part.buffer for part in parts])
                except BadFrame:  # of another version, say
                    continue
                if frame.kind == PROBE and not frame.total:
                    self._say(Frame(PROBE, BY_KEY, total=frame.start), b"")
                else:
                    yield frame, body
            elif self._monitor in ready and any(
                event == zmq.EVENT_DISCONNECTED for event in _events(self._monitor)
            ):
                raise NoAnswer("its connection was closed")


def mechanism_at(address: str) -> str | None:
    """Return how who listens there lets others in, as libzmq names it: NULL for without keys.

    "?" for what does not speak as libzmq does, empty for who hangs up or is silent; None where
    nobody can be reached.
    """
    host, _, port = address.rpartition(":")
    signature = b"\xff" + (17).to_bytes(8, "big") + b"\x7f"  # as `greetings.routing_id(0)` has it
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _LOOK_SECONDS) as line:
            found, until = b"", time.monotonic() + _LOOK_SECONDS
            with suppress(OSError):  # cut off, or silent
                line.sendall(signature + b"\3\0")  # no more: then it says all of its own
                while len(found) < _ZMTP_BYTES and time.monotonic() < until:
                    line.settimeout(max(until - time.monotonic(), 0.01))
                    if not (more := line.recv(_ZMTP_BYTES - len(found))):
                        break
                    found += more
    except OSError:
        return None
    if len(found) < _ZMTP_BYTES or found[:1] != b"\xff":
        return "?" if found and found[:1] != b"\xff" else ""
    return found[_MECHANISM].rstrip(b"\0").decode(errors="replace")


def _events(monitor: Any) -> Iterator[int]:
    """Yield what libzmq tells of a connection."""
    with suppress(zmq.Again):
        while True:
            yield parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
