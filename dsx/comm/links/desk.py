"""What a cluster's first rank answers to the tools of members: how the run stands, and orders.

A tool is a process of a member, on any of its hosts: a *visitor*. It greets like a rank, with a
number that no rank has, so the connection's key tells whose it is. It asks one cluster, which
passes the question on to the others, as not every cluster can be called from everywhere.

    {"verb": "status"}                       -> {"asked": 1, "answers": {"0": {...}, "1": {...}}}
    {"verb": "leave", "to": 2, "why": ...}

What a verb does is for whoever has put it up (`verbs`): nothing here knows of training.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Any, cast

from dsx.comm.links.link import Link
from dsx.comm.links.peer import FIRST_VISITOR, LinkDown
from dsx.comm.links.requests import Answer, Name

ASKED = b"?"  # how a visitor's requests begin
PROTOCOL = 1
_OTHERS_SECONDS = 3.0  # in which another cluster has to answer
_AT_ONCE = 16  # requests that wait for other clusters
Verb = Callable[[Mapping[str, Any]], Mapping[str, Any]]
logger = logging.getLogger(__name__)


def visitor_rank() -> int:
    """Return the number of a visitor, which no rank has and hardly another visitor."""
    return random.SystemRandom().randrange(FIRST_VISITOR, 2 * FIRST_VISITOR)


class Desk:
    """That of one cluster; `names` are the members', by cluster.

    `verbs` are called in a thread of their own, with the request and in it, as "by", the member
    that asks; ValueError is an answer, too. "facts" are what "status" says of this cluster.
    """

    def __init__(self, link: Link, names: Sequence[str]) -> None:
        self._link, self._names = link, list(names)
        self.facts: list[Callable[[], Mapping[str, Any]]] = []
        self.verbs: dict[str, Verb] = {"status": self._status}
        self._free = threading.Semaphore(_AT_ONCE)
        link.serve(self._receive, ASKED)

    def _status(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        told: dict[str, Any] = {"state": "starting", "protocol": PROTOCOL}
        for facts in self.facts:
            told |= facts()
        return told

    def _receive(self, asker: Name, body: bytes, answer: Answer) -> None:
        """Take a request, in the link's thread."""

        def say(told: Mapping[str, Any]) -> None:
            text = json.dumps({"asked": self._link.cluster_id, **told}).encode()
            self._link.soon(lambda: answer(text))

        try:
            request = self._read(asker, body)
        except (ValueError, TypeError, RecursionError) as error:
            say({"error": f"a request that cannot be read: {error}"})
            return
        if not self._free.acquire(blocking=False):
            say({"error": f"{_AT_ONCE} requests are being answered; ask again in a moment"})
            return

        def work() -> None:
            try:
                say({"answers": self._answers(request)})
            except Exception as error:
                logger.exception("a request of %s", request["by"])
                say({"error": f"{type(error).__name__}: {error}"})
            finally:
                self._free.release()

        threading.Thread(target=work, name="dsx-desk", daemon=True).start()

    def _read(self, asker: Name, body: bytes) -> dict[str, Any]:
        request: Any = json.loads(body[len(ASKED) :])
        if not isinstance(request, dict) or not isinstance(cast(Any, request).get("verb"), str):
            raise ValueError("it says no verb")
        request = cast("dict[str, Any]", request)
        to = request.setdefault("to", None)
        if to is not None and not (type(to) is int and 0 <= to < len(self._names)):
            raise ValueError(f"it is for cluster {to!r}, of {len(self._names)}")
        if asker[1] != 0 or "by" not in request:  # a first rank passes on what it was asked
            request["by"] = self._names[asker[0]]
        return request

    def _answers(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what each cluster answers that is asked, this one among them."""
        own, to = self._link.cluster_id, request["to"]
        asked = range(len(self._names)) if to is None else [to]
        body = {name: value for name, value in request.items() if name != "to"}
        under_way: dict[int, Future[bytes]] = {}
        answers: dict[int, Any] = {}
        for cluster in asked:
            if cluster == own:
                continue
            if self._link.process_at((cluster, 0)) is None:
                why = self._link.why_gone((cluster, 0)) or "it has not been met yet"
                answers[cluster] = {"error": why, "is_gone": True}
                continue
            text = json.dumps({**body, "to": cluster}).encode()
            under_way[cluster] = self._link.ask((cluster, 0), ASKED + text)
        if own in asked:
            answers[own] = self._do(request)
        until = time.monotonic() + _OTHERS_SECONDS
        for cluster, answered in under_way.items():
            try:
                told = json.loads(answered.result(max(until - time.monotonic(), 0.0)))
                answers[cluster] = told.get("answers", {}).get(str(cluster), told)
            except WaitedTooLong:
                answered.cancel()
                answers[cluster] = {"error": f"no answer within {_OTHERS_SECONDS:g} s"}
            except (LinkDown, ValueError) as error:
                answers[cluster] = {"error": str(error)}
        return {str(cluster): answers[cluster] for cluster in sorted(answers)}

    def _do(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        verb = self.verbs.get(request["verb"])
        if verb is None:
            known = ", ".join(sorted(self.verbs))
            return {"error": f"{request['verb']!r} is not served here now; these are: {known}"}
        try:
            return verb(request)
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)}
