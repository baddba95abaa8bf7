"""Requests between processes, and their answers: each is asked until it is answered or given up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dsx.comm.links.frames import ANSWER, BadFrame, Frame
from dsx.comm.links.peer import LinkDown, Peer

_MOST_UNSERVED = 4096  # that have come before there was who serves
Name = tuple[int, int]  # cluster and rank
Answer = Callable[[bytes], object]
Serve = Callable[[Name, bytes, Answer], object]


class Requests:
    """A link's, both ways; used by its thread alone."""

    def __init__(self, own: Name) -> None:
        self._own = own
        self._serves: dict[bytes, Serve] = {}  # by how requests begin
        self._unserved: list[tuple[Peer, int, bytes]] = []
        self._answers: dict[int, Future[bytes]] = {}
        self._num_asked = 0

    @property
    def num_waiting(self) -> int:
        """Of those without an answer."""
        return len(self._answers)

    def serve(self, serve: Serve, first: bytes) -> None:
        """Hand requests that begin with a byte to `serve`, also those that have come already.

        b"": those for which nobody else is there.
        """
        self._serves[first] = serve
        unserved, self._unserved = self._unserved, []
        for request in unserved:
            self.take(*request)

    def ask(self, peer: Peer, body: bytes, answer: Future[bytes]) -> int:
        """Ask a peer, or this process itself; return the request's number."""
        self._num_asked += 1
        if peer.error is not None:
            end_future(answer, peer.error)
        elif (peer.cluster_id, peer.rank) == self._own and (serve := self._server_of(body)):
            serve(self._own, body, lambda text: end_future(answer, text))
        else:
            self._answers[self._num_asked] = answer
            peer.ask(self._num_asked, body)
        return self._num_asked

    def forget(self, peer: Peer, number: int) -> None:
        """Give a request up: nobody waits for its answer any more."""
        self._answers.pop(number, None)
        peer.asked.pop(number, None)

    def take(self, peer: Peer, number: int, body: bytes) -> None:
        """Take a peer's request. BadFrame if there are too many, and nobody serves yet."""

        def answer(text: bytes) -> None:
            peer.say(Frame(ANSWER, self._own[0], serial=number), text)

        if serve := self._server_of(body):
            serve((peer.cluster_id, peer.rank), body, answer)
        elif len(self._unserved) < _MOST_UNSERVED:
            self._unserved.append((peer, number, body))
        else:
            raise BadFrame("a request where nobody serves")

    def _server_of(self, body: bytes) -> Serve | None:
        return self._serves.get(body[:1]) or self._serves.get(b"")

    def take_answer(self, peer: Peer, number: int, body: bytes) -> None:
        """Take an answer, which counts from whom was asked."""
        if peer.asked.pop(number, None) is not None:
            end_future(self._answers.pop(number), body)

    def give_up(self, peer: Peer) -> None:
        """End what a peer was asked that has gone, or is lost and may come back."""
        error = peer.error or LinkDown(peer.suspected)
        for number in peer.asked:
            end_future(self._answers.pop(number), error)
        peer.asked.clear()


def end_future(future: Future[Any], outcome: Any) -> None:
    """Set a result, or an exception, unless whoever waited has given up."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
