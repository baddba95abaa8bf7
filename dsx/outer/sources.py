"""Where a cluster that heals takes things from: the ranks of its number in the others, all at once.

What more than half of them tell alike is taken; slices come from several of them, each checked by
its hash, within a rate.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for
from dsx.outer.donor import DATA, FIRST, GONE
from dsx.outer.parcel import Opened

Ask = Callable[[int, bytes], "Future[bytes]"]  # a cluster, and a request
_LOOK_SECONDS = 0.05
_ASKS_AT_ONCE = 4  # of each source
_MOST_WRONG = 3  # slices of one source that are not what their hashes say
logger = logging.getLogger(__name__)


class BeginAnew(RuntimeError):
    """What was being copied cannot be had any more; another try may succeed."""


class Rate:
    """So many bytes per second for all that asks; None: as many as come."""

    def __init__(self, mbit: float | None) -> None:
        self._seconds_per_byte = 0.0 if mbit is None else 8e-6 / mbit
        self._lock, self._next = threading.Lock(), 0.0

    def wait(self, num_bytes: int) -> None:
        """Block until so many may be asked for."""
        with self._lock:
            at = max(self._next, time.monotonic())
            self._next = at + num_bytes * self._seconds_per_byte
        time.sleep(max(at - time.monotonic(), 0.0))


class Sources:
    """The clusters that one rank takes from, in one try to heal; `id` names the try there."""

    def __init__(
        self,
        ask: Ask,
        clusters: Sequence[int],
        id: str,
        rate: Rate,
        deadline_seconds: float,
        moved: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """`moved` hears of each slice's bytes, on any thread; 0 for a sign of life."""
        self._ask, self.clusters, self._id = ask, tuple(clusters), id
        self._rate, self._deadline_seconds, self.moved = rate, deadline_seconds, moved
        self.is_over = False
        self.newest = 0  # launch whose result one of them has, as was told last

    def where(self) -> dict[int, dict[str, Any]]:
        """Return where each cluster is that answers; BeginAnew if it is not most of them."""
        answers = self._everyone("where")
        found = {c: json.loads(a[1:]) for c, a in answers.items() if a[:1] == DATA}
        self._require_most(len(found), "do not answer")
        self.newest = max(self.newest, *(place["result"] for place in found.values()))
        return found

    def tell(self, verb: str, *operands: Any) -> dict[int, bytes]:
        """Ask all something of this try; answers of those who do answer."""
        return self._everyone(verb, self._id, *operands)

    def tell_one(self, cluster: int, verb: str, *operands: Any) -> bytes:
        """Ask one of them something of this try; its answer, also where there is none."""
        return self._answer(self._ask(cluster, _packed(verb, self._id, *operands)))

    def say(self, verb: str, *operands: Any) -> None:
        """Tell all something, and wait for no answer."""
        for cluster in self.clusters:
            self._ask(cluster, _packed(verb, self._id, *operands))

    def parcel(
        self,
        of_head: Sequence[Any],
        of_slice: Sequence[Any],
        held: Callable[[str], Tensor | None] | None = None,
        begun: Callable[[Opened], object] = lambda opened: None,
    ) -> Opened:
        """Return what more than half tell alike, whole; BeginAnew if they do not have it.

        `held(name)` may be a tensor of it as it was once: what is alike in it is not fetched.
        `begun` hears of what is to be fetched before the first slice is.
        """
        head, sources = self._agreed_head(of_head)
        opened = Opened(head)
        begun(opened)
        if held is not None:
            for name in opened.tensors:
                opened.begin_with(name, held(name))
                self.say("told", "")  # a sign of life: of what is large reading takes a while
        _Fetch(self, opened, of_slice, sources).run()
        return opened

    def fetch(self, cluster: int, num_bytes: int, request: Sequence[Any]) -> bytes:
        """Return a slice from a cluster, within the rate; RuntimeError if it has none."""
        self._rate.wait(num_bytes)
        answer = self._answer(self._ask(cluster, _packed(request[0], self._id, *request[1:])))
        if answer[:1] != DATA:
            raise RuntimeError(f"cluster {cluster} has it no more")
        self.moved(len(answer) - 1)
        return answer[1:]

    def _agreed_head(self, request: Sequence[Any]) -> tuple[bytes, list[int]]:
        what, pause = f"{request[0]} of {len(self.clusters)} cluster(s)", 0.002
        until, steps = time.monotonic() + self._deadline_seconds, dict[int, int]()
        with waiting_for(what, None):
            while not self.is_over:
                answers = self.tell(*request)
                heads = Counter(a[1:] for a in answers.values() if a[:1] == DATA)
                most, count = max(heads.items(), key=lambda one: one[1], default=(b"", 0))
                if 2 * count > len(self.clusters):
                    return most, [c for c, a in answers.items() if a[1:] == most]
                here = [a for a in answers.values() if a[:1] != GONE]
                self._require_most(len(here), "do not have it any more")
                if len(here) == sum(heads.values()):
                    raise BeginAnew(f"{what}: they tell different ones")
                if time.monotonic() > until:  # it is there once the others have gone on
                    until, before = time.monotonic() + self._deadline_seconds, steps
                    steps = {cluster: place["step"] for cluster, place in self.where().items()}
                    moved = [c for c in steps.keys() & before if steps[c] > before[c]]
                    if before and 2 * len(moved) <= len(self.clusters):
                        raise PeerLost(
                            f"{what}: most of them have taken no step for "
                            f"{self._deadline_seconds:g} s (clusters.deadline_seconds)"
                        )
                self.moved(0)
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_SECONDS)
        raise PeerLost(f"{what}: given up")

    def _require_most(self, count: int, why: str) -> None:
        if 2 * count <= len(self.clusters):
            named = ", ".join(map(str, self.clusters))
            raise BeginAnew(f"too many of cluster(s) {named} {why}")

    def _everyone(self, *request: Any) -> dict[int, bytes]:
        asked = {cluster: self._ask(cluster, _packed(*request)) for cluster in self.clusters}
        return {cluster: self._answer(future) for cluster, future in asked.items()}

    def _answer(self, asked: Future[bytes]) -> bytes:
        try:
            return asked.result(self._deadline_seconds)
        except Exception as error:  # noqa: BLE001 - it has gone, or does not answer
            asked.cancel()
            return GONE + str(error).encode()


class _Fetch:
    """The slices of one parcel on their way."""

    def __init__(
        self, sources: Sources, opened: Opened, request: Sequence[Any], clusters: Sequence[int]
    ) -> None:
        self._sources, self._opened, self._request = sources, opened, request
        self._clusters = clusters
        self._lock = threading.Lock()
        self._due = deque(range(len(opened.hashes)))
        self._left = len(opened.hashes)
        self._wrong = Counter[int]()

    def run(self) -> None:
        """Fetch all; BeginAnew where no source has what is left."""
        if not self._left:
            return
        per_source = min(_ASKS_AT_ONCE, self._left)
        workers = [
            threading.Thread(target=self._work, args=(cluster,), name="dsx-heal", daemon=True)
            for cluster in self._clusters for _ in range(per_source)
        ]  # fmt: skip
        for worker in workers:
            worker.start()
        for worker in workers:
            with waiting_for("slices of other clusters", None):
                worker.join()
        if self._left:
            raise BeginAnew(f"nobody has {self._left} of {len(self._opened.hashes)} slices")

    def _work(self, cluster: int) -> None:
        while not self._sources.is_over and self._wrong[cluster] < _MOST_WRONG:
            with self._lock:
                if not self._left:
                    return
                index = self._due.popleft() if self._due else None
            if index is None:  # another source may fail yet
                time.sleep(_LOOK_SECONDS)
                continue
            if held := self._opened.length_if_held(index):
                with self._lock:
                    self._opened.held_bytes += held
                    self._left -= 1
                continue
            try:
                request = (*self._request, index)
                data = self._sources.fetch(cluster, self._opened.slice_bytes, request)
                is_right = self._opened.put(index, data)
            except (RuntimeError, ValueError):  # it has none, or one of another length
                with self._lock:
                    self._due.append(index)
                return
            with self._lock:
                if is_right:
                    self._left -= 1
                    continue
                self._wrong[cluster] += 1
                self._due.append(index)
            logger.warning(
                "cluster %d has sent a slice that is not what its hash says; it is taken from "
                "another one, if there is one", cluster,
            )  # fmt: skip


def _packed(*request: Any) -> bytes:
    return FIRST + json.dumps(request).encode()
