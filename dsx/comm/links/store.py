"""A key-value store over links: what clusters meet at, encrypted, for members alone.

It has the verbs of torch's stores that a rendezvous needs, so that what is written for one runs on
the other. One process holds the values (`Shelf`) and serves them in its link's thread; others ask
it (`LinkStore`). A request that an interrupted connection has swallowed is sent again, done once.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import OrderedDict
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as WaitedTooLong
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsx.comm.links.link import Link
from dsx.comm.links.requests import Answer, Name

_KEPT_ANSWERS = 1024  # of each asker, for requests that come again
_MOST_KEYS = 100_000
_MOST_REQUEST_BYTES = 1 << 21
_CALL_SECONDS = 60.0


class Shelf:
    """The values, and who waits for some; used by one thread."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[list[str], float, Answer]]] = {}  # by a missing key
        self._answered: dict[Name, OrderedDict[str, bytes]] = {}

    def serve(self, asker: Name, body: bytes, answer: Answer) -> None:
        """Do a request, once; its answer may have to wait for keys."""
        try:
            number, verb, *operands = json.loads(body)
            done = self._answered.setdefault(asker, OrderedDict())
            if number in done:
                answer(done[number])
                return
            if verb == "wait":
                keys, seconds = operands
                self._wait([str(k) for k in keys], time.monotonic() + seconds, answer)
            else:
                done[number] = _told(self._do(verb, operands))
                answer(done[number])
                if len(done) > _KEPT_ANSWERS:
                    done.popitem(last=False)
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            RecursionError,
            OverflowError,
        ) as error:
            answer(json.dumps({"error": f"a request that cannot be done: {error}"}).encode())

    def _do(self, verb: str, operands: list[Any]) -> Any:
        values = self._values
        if verb == "get":
            return values.get(operands[0])
        if verb == "multi_get":
            return [values.get(str(key)) for key in operands[0]]
        if verb == "check":
            return all(key in values for key in operands[0])
        if verb == "multi_set":
            for key, value in zip(*operands, strict=True):
                self._do("set", [key, value])
            return True
        key, *rest = operands
        if len(values) >= _MOST_KEYS and key not in values:
            raise ValueError(f"the store is full: {_MOST_KEYS} keys")
        if verb == "set":
            values[key] = rest[0]
        elif verb == "add":
            values[key] = str(int(values.get(key, "0")) + int(rest[0]))
        elif verb == "compare_set":
            expected, desired = rest
            if values.get(key, "") == expected:
                values[key] = desired
        elif verb == "delete":
            return values.pop(key, None) is not None
        else:
            raise ValueError(f"verb {verb!r}")
        if key in values:
            self._has_come(key)
        return values.get(key, rest[0])

    def _wait(self, keys: list[str], until: float, answer: Answer) -> None:
        """Answer once all keys are there; whoever has waited too long has given up, too."""
        missing = next((key for key in keys if key not in self._values), None)
        if missing is None:
            answer(_told(True))
            return
        others = self._waiting.setdefault(missing, [])
        if others and others[0][1] < (now := time.monotonic()):
            others[:] = [waiter for waiter in others if waiter[1] >= now]
        others.append((keys, until, answer))

    def _has_come(self, key: str) -> None:
        """Look again at those who have waited for a key."""
        for keys, until, answer in self._waiting.pop(key, ()):
            if time.monotonic() <= until:
                self._wait(keys, until, answer)


class LinkStore(dist.Store):
    """The store of another process, or of this one. Values are text; RuntimeError where it is
    lost, or a key does not come in time. It lives as long as its link.
    """  # fmt: skip

    def __init__(self, link: Link, holder: Name) -> None:
        super().__init__()
        self._link, self._holder = link, holder
        link.held.append(self)  # torch's wrappers hold what is in C++ alone
        self._lock = threading.Lock()
        self._nonce = uuid.uuid4().hex  # of this process: another one counts from 1, too
        self._num_asked = 0

    def set(self, key: str, value: Any) -> None:
        """Put a value on the shelf."""
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Return a value; it waits for none, unlike torch's, whose callers have looked before."""
        value = self._ask("get", key)
        if value is None:
            raise RuntimeError(f"the key {key} has not been set")
        return value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values at once."""
        values = self._ask("multi_get", keys)
        if None in values:
            raise RuntimeError(f"the key {keys[values.index(None)]} has not been set")
        return [value.encode() for value in values]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Put several values on the shelf."""
        self._ask("multi_set", keys, [_text(value) for value in values])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have been set."""
        return self._ask("check", keys)

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Set what is as expected ("" for a new key); return what is there now."""
        return self._ask("compare_set", key, _text(expected_value), _text(desired_value)).encode()

    def delete_key(self, key: str) -> bool:
        """Take a value from the shelf; whether there was one."""
        return self._ask("delete", key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_CALL_SECONDS)) -> None:
        """Block until keys have been set; RuntimeError after `timeout`."""
        seconds = timeout.total_seconds()
        if not self._ask("wait", keys, seconds, seconds=seconds):
            raise RuntimeError(f"{', '.join(keys)} did not come within {seconds:g} s")

    def _ask(self, verb: str, *operands: Any, seconds: float = _CALL_SECONDS) -> Any:
        with self._lock:
            self._num_asked += 1
            number = f"{self._nonce}.{self._num_asked}"
        body = json.dumps([number, verb, *operands]).encode()
        if len(body) > _MOST_REQUEST_BYTES:
            raise RuntimeError(f"{verb} of {len(body)} bytes: at most {_MOST_REQUEST_BYTES}")
        answered = self._link.ask(self._holder, body)
        try:
            answer = json.loads(answered.result(seconds))
        except (WaitedTooLong, CancelledError):
            answered.cancel()
            if verb == "wait":
                return False
            raise RuntimeError(f"no answer within {seconds:g} s") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def _told(value: Any) -> bytes:
    return json.dumps({"value": value}).encode()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
