"""What one rank gives to a cluster that heals: shared state as of a boundary, and results since.

Asked in the link's thread, which only hands out. The copy is of the boundary that was agreed on; a
thread makes it while the next inner step is computed, in which nothing of it changes. The training
thread waits for what is left of that, before the next boundary; nothing else here waits.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsx.core.waits import waiting_for
from dsx.outer.loop import OuterLoop
from dsx.outer.parcel import Parcel
from dsx.outer.results import Results
from dsx.outer.shared_state import copy_shared

FIRST = b"H"  # how requests begin; answers begin with one of these
WAIT, GONE, DATA = b"W", b"G", b"D"
KEPT_ROUNDS = 8  # whose results are kept; who is farther behind begins anew
_PLACES_KEPT = 4096  # boundaries
_MOST_SILENT_SECONDS = 60.0  # of one who heals
logger = logging.getLogger(__name__)


@dataclass
class _Healing:
    """One who heals, by the name of his try and a number of his process; his copy is of `step`."""

    id: str
    step: int
    process: int = 0
    state: bytes = WAIT
    copy: Parcel | None = None
    heard_at: float = field(default_factory=time.monotonic)


class Donor:
    """One rank's part in bringing others back."""

    def __init__(
        self,
        loop: OuterLoop,
        refuses: str = "",
        places: Callable[[], str] = lambda: "{}",
        told: Callable[[int, str], object] = lambda cluster, text: None,
    ) -> None:
        """`refuses`: why nobody can be brought back here, if so. `places` are those of the data,
        and of what else a script tracks, at a boundary; `told` hears how somebody's healing goes.
        """
        self._loop, self._refuses, self._places, self._told = loop, refuses, places, told
        self._places_at: dict[int, str] = {}  # by step, of the last ones
        numel = sum(loop.state.wire_numel(f.id) for f in loop.adapter.fragments)
        self.most_bytes = 4 * numel * KEPT_ROUNDS + 1_000_000
        self._results = Results()
        self._healing: dict[int, _Healing] = {}  # by cluster
        self._lock = threading.Lock()
        self._copying: threading.Thread | None = None
        loop.attempts.on_result = self._results.keep
        loop.at_boundary = self.pass_boundary
        loop.before_change = self.end_copy

    @property
    def healing(self) -> dict[int, int]:
        """The clusters that take from here now, and a number of the process; any thread."""
        with self._lock:
            return {cluster: one.process for cluster, one in sorted(self._healing.items())}

    def pass_boundary(self) -> None:
        """Begin the copy that is due; on the training thread."""
        if not self._healing:
            return
        step = self._loop.history.step
        with self._lock:
            self._places_at[step] = self._places()
            self._places_at.pop(step - _PLACES_KEPT, None)
            due = [h for h in self._healing.values() if h.state == WAIT and h.copy is None]
            is_alone = len(self._healing) == 1
        now = [healing for healing in due if healing.step == step]
        if now:  # without the lock: the link's thread goes on meanwhile
            copy = copy_shared(self._loop, self._results, prunes=is_alone)
            thread = threading.Thread(
                target=self._copy, args=(copy, now), name="dsx-copy", daemon=True
            )
            try:
                thread.start()
                self._copying = thread
            except RuntimeError:  # there can be no more threads
                self._copy(copy, now)
        with self._lock:
            for healing in due:
                if healing.step < step:
                    healing.state = GONE
            self._let_go()

    def end_copy(self) -> None:
        """Wait for the copy that was begun, if one was; on the training thread."""
        if self._copying is not None:
            with waiting_for("the copy for a cluster that heals", None):
                self._copying.join()
            self._copying = None

    def _copy(self, copy: Callable[[], Parcel] | None, healing: list[_Healing]) -> None:
        parcel = None
        try:
            parcel = None if copy is None else copy()
        except (RuntimeError, MemoryError) as error:  # too little memory, says torch, too
            logger.warning("what a cluster that heals needs is not copied: %s", error)
        with self._lock:
            for one in healing:
                one.copy, one.state = parcel, GONE if parcel is None else DATA

    def serve(self, asker: tuple[int, int], body: bytes, answer: Callable[[bytes], object]) -> None:
        """Answer a request; in the link's thread."""
        try:
            verb, *operands = json.loads(body[len(FIRST) :])
            answer(self._do(asker[0], str(verb), operands))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            answer(GONE + f"a request that cannot be done: {error}"[:500].encode())

    def _do(self, cluster: int, verb: str, operands: list[Any]) -> bytes:
        if verb == "where":
            return DATA + json.dumps(self._where()).encode()
        id, *rest = operands
        with self._lock:
            if verb == "begin":
                return self._begin(cluster, str(id), int(rest[0]), int(rest[1]))
            healing = self._healing.get(cluster)
            if healing is None or healing.id != id:
                return GONE + b"it is not known here any more"
            healing.heard_at = time.monotonic()
            if verb == "told":
                self._told(cluster, str(rest[0])[:200])
                return DATA
            if verb == "end":
                del self._healing[cluster]
                self._let_go()
                return DATA
            if verb == "places":
                places = self._places_at.get(int(rest[0]))
                return WAIT if places is None else DATA + places.encode()
            if verb in ("head", "slice"):
                return self._of_copy(healing, verb, rest)
        return self._of_result(verb, rest)

    def _where(self) -> dict[str, Any]:
        loop = self._loop
        return {
            "step": loop.history.step,
            "result": max(self._results.numbers, default=0),
            "ids": [*loop.transport.seat.ids],
            "refuses": self._refuses,
        }

    def _begin(self, cluster: int, id: str, step: int, process: int) -> bytes:
        self._results.begin()
        self._healing[cluster] = _Healing(id, step, process)
        return DATA

    def _of_copy(self, healing: _Healing, verb: str, operands: list[Any]) -> bytes:
        if healing.copy is None:
            return healing.state
        if verb == "slice":
            return DATA + healing.copy.slice(operands[0])
        head = healing.copy.head_soon()
        return WAIT if head is None else DATA + head

    def _of_result(self, verb: str, operands: list[Any]) -> bytes:
        parcel = self._results.parcel(int(operands[0]))
        if verb == "drop":
            if len(self._healing) == 1:  # nobody else needs it
                self._results.drop({int(operands[0])})
            return DATA
        if parcel is None:
            return WAIT
        if verb == "result":
            head = parcel.head_soon()
            return WAIT if head is None else DATA + head
        if verb == "piece":
            return DATA + parcel.slice(int(operands[1]))
        raise ValueError(f"verb {verb!r:.40}")

    def _let_go(self) -> None:
        """Forget those who are silent, and all where too much is kept; with the lock."""
        now = time.monotonic()
        for cluster, healing in [*self._healing.items()]:
            if now > healing.heard_at + _MOST_SILENT_SECONDS:
                del self._healing[cluster]
        if self._healing and self._results.num_bytes > self.most_bytes:
            logger.warning(
                "cluster(s) %s heal too slowly: more than %d rounds behind, whose results are not "
                "kept any longer; the copy begins anew (link.heal_rate_mbit)",
                ", ".join(map(str, self._healing)), KEPT_ROUNDS,
            )  # fmt: skip
            self._healing.clear()
        if not self._healing:
            self._results.end()
            self._places_at.clear()
