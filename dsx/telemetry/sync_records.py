"""Records of syncs for a whole cluster, gathered from its ranks without a collective.

A rank knows only its shard: it may own nothing of a fragment. Each rank posts its numbers to the
cluster's own key-value store one boundary after the sync (tensors are ready by then, so nothing
stalls an accelerator), and rank 0 reads them one boundary later, when the inner engine's own
gradient reduction has shown that every rank has passed the posting. A thread of its own asks the
store, which may be lost or silent; what it has put together is written at a boundary.

Bytes add up, seconds are the longest of any rank, and norms are those of the whole fragment: the
squares add up, divided by how many times the cluster holds each element.

The stages of a pipeline sync on their own, with fragments numbered within each: the first rank of a
stage puts its records together and posts them with their `stage`, and rank 0 writes what it finds
posted. By the order of a pipeline's passes that is at most one boundary later. Launches go the same
way from further stages, and are written at once on the rank that writes.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

from dsx.core.fifo import Fifo
from dsx.core.host_numbers import HostNumbers
from dsx.core.types import Stage
from dsx.core.waits import waiting_for

logger = logging.getLogger(__name__)
_SUMMED = ("bytes_sent",)
_MOST_SECONDS = 60.0  # that training waits for a record
_LONGEST = (
    "wait_seconds", "transfer_seconds", "coding_seconds", "turn_seconds", "commit_seconds",
)  # fmt: skip


class KeyValueStore(Protocol):
    """The part of torch's store that is used here."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until the keys are there; RuntimeError after the timeout."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether the keys are there."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        ...


class SyncRecords:
    """One rank's part in its cluster's records; `write` is called on rank 0 only.

    `shard` is this rank among those of its stage, and their number.
    """

    def __init__(
        self,
        store: KeyValueStore,
        stage: Stage,
        shard: tuple[int, int],
        fragment_numel: Sequence[int],
        write: Callable[[Mapping[str, Any]], None],
        deadline_seconds: float,
        is_enabled: bool = True,
    ) -> None:
        self._store = store
        self._stage = stage
        self._rank, self._num_ranks = shard
        self._fragment_numel = fragment_numel
        self._write = write
        self._is_enabled = is_enabled
        self._deadline = timedelta(seconds=min(deadline_seconds, _MOST_SECONDS))
        self._fresh: list[HostNumbers] = []
        self._ready: list[HostNumbers] = []
        is_alone = self._num_ranks == stage.count == 1
        self._thread = None if is_alone or not is_enabled else Fifo("dsx-sync-records")
        self._under_way: deque[tuple[float, Future[None]]] = deque()  # on the thread, since when
        self._combined: deque[Mapping[str, Any]] = deque()  # on the thread, to be written
        self._posted: list[tuple[str, dict[str, Any]]] = []
        self._passed_on = [0] * stage.count  # records of each further stage, posted or written
        self._flushes = 0
        self._launches: list[Mapping[str, Any]] = []  # of a further stage, to be passed on
        self.write_launch: Callable[[Mapping[str, Any]], object] = lambda record: None
        self._is_ended = False
        self.bytes_sent = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep what the loop says of a sync; its tensors may still be computing."""
        if self._is_enabled:
            self._fresh.append(HostNumbers(event))

    def launched(self, record: Mapping[str, Any]) -> None:
        """Write, or pass on, that a fragment's transfer is under way from now on."""
        if self._is_writer:
            self.write_launch(record)
        elif not self._rank and self._is_enabled:
            self._launches.append({**record, "kind": "launch", "stage": self._stage.index})

    def pass_boundary(self) -> None:
        """Write what was posted a boundary ago, then post what came the boundary before.

        Where the store is lost or silent, or a rank does not post, these records end, and nothing
        else does.
        """
        self._write_combined()
        ready = [numbers.read() for numbers in self._ready]
        self._ready, self._fresh = self._fresh, []
        launches, self._launches = self._launches, []
        self._do(lambda: self._pass_boundary(ready, launches))

    def flush(self) -> None:
        """Write everything now; rank 0 waits for the others, which must flush, too.

        So long at most: see above.
        """
        for _ in range(3):
            self.pass_boundary()
        self._do(self._flush)
        self._write_combined(waits=True)

    def close(self) -> None:
        """Let the thread end, when it comes to it."""
        if self._thread is not None:
            self._thread.end_soon()
            self._thread = None

    def _do(self, work: Callable[[], None]) -> None:
        """Have something done with the store, on the thread, if another rank takes part."""
        if self._is_ended or not self._is_enabled:
            return
        if self._thread is None:
            work()
            self._write_combined()
            return
        done: Future[None] = Future()
        self._under_way.append((time.monotonic(), done))
        self._thread.submit(done, work)

    def _write_combined(self, waits: bool = False) -> None:
        """Write what is ready, of all that is under way if it `waits`; or end these records."""
        deadline = self._deadline.total_seconds() + 1  # what the store says by then is told
        until = time.monotonic() + deadline
        while self._under_way and not self._is_ended:
            since, done = self._under_way[0]
            try:
                if waits:
                    with waiting_for("the records of this cluster's syncs", deadline):
                        done.result(max(until - time.monotonic(), 0.0))
                elif done.done():
                    done.result()
                elif time.monotonic() > since + deadline:
                    raise futures.TimeoutError
                else:
                    break
            except futures.TimeoutError:
                self._end(f"this cluster's store has not answered within {deadline:g} s")
            except RuntimeError as error:
                self._end(str(error).splitlines()[0])
            else:
                self._under_way.popleft()
        while self._combined:
            record = self._combined.popleft()
            if record.get("kind") == "launch":
                self.write_launch(record)
            else:
                self.bytes_sent += record["bytes_sent"]
                self._write(record)

    def _end(self, why: str) -> None:
        self._is_ended, self._is_enabled = True, False
        self._fresh, self._ready = [], []
        self._under_way.clear()
        self.close()
        logger.warning(
            "the records of syncs end here, and so does the count of bytes sent: %s; training "
            "goes on", why,
        )  # fmt: skip

    def _pass_boundary(
        self, ready: Sequence[dict[str, Any]], launches: Sequence[Mapping[str, Any]]
    ) -> None:
        if self._rank == 0:
            for record in launches:
                self._pass_on(record)
            for key, own in self._posted:
                self._pass_on(self._combine(key, own))
            if self._is_writer:
                for stage in range(1, self._stage.count):
                    while self._store.check([self._key_of(stage)]):
                        self._take(stage)
        self._posted = [self._post(event) for event in ready]

    def _flush(self) -> None:
        self._flushes += 1
        if self._is_writer:
            for stage in range(1, self._stage.count):
                self._take_all(stage)
        elif not self._rank:
            count = self._passed_on[self._stage.index]
            self._store.set(f"flush/{self._stage.index}/{self._flushes}", str(count))

    @property
    def _is_writer(self) -> bool:
        return self._rank == self._stage.index == 0

    def _key_of(self, stage: int) -> str:
        """Return the key of the next record that a further stage passes on."""
        return f"stage/{stage}/{self._passed_on[stage]}"

    def _pass_on(self, record: Mapping[str, Any]) -> None:
        """Write a record of this stage, or post it for the rank that writes."""
        if self._is_writer:
            self._combined.append(record)
        else:
            self._store.set(self._key_of(self._stage.index), json.dumps(record))
            self._passed_on[self._stage.index] += 1

    def _take(self, stage: int) -> None:
        """Write the next record of a further stage."""
        key = self._key_of(stage)
        record = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._passed_on[stage] += 1
        self._combined.append(record)

    def _take_all(self, stage: int) -> None:
        """Write what a further stage has passed on by its flush."""
        key = f"flush/{stage}/{self._flushes}"
        try:
            with waiting_for(f"records of pipeline stage {stage}", self._deadline.total_seconds()):
                self._store.wait([key], self._deadline)
            count = int(self._store.get(key))
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline stage {stage} of this cluster has not posted its records within "
                f"{self._deadline.total_seconds():g} s"
            ) from error
        self._store.delete_key(key)
        while self._passed_on[stage] < count:
            self._take(stage)

    def _post(self, own: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        key = f"sync/{self._stage.index}/{own['fragment']}/{own['launched_step']}"
        if self._rank:
            self._store.set(f"{key}/{self._rank}", json.dumps(own))
        return key, own

    def _combine(self, key: str, own: dict[str, Any]) -> dict[str, Any]:
        keys = [f"{key}/{rank}" for rank in range(1, self._num_ranks)]
        try:
            if keys:
                with waiting_for(
                    f"{', '.join(keys)} of this cluster", self._deadline.total_seconds()
                ):
                    self._store.wait(keys, self._deadline)
            everyone = [own, *(json.loads(self._store.get(k)) for k in keys)]
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._stage.name_of(own['fragment'])} applied at step {own['applied_step']}: a "
                "rank of this cluster has not posted its record within "
                f"{self._deadline.total_seconds():g} s"
            ) from error
        for k in keys:
            self._store.delete_key(k)
        held = sum(record["numel"] for record in everyone)
        copies = held / self._fragment_numel[own["fragment"]]
        record = {**own, "numel": self._fragment_numel[own["fragment"]]}
        for name in _SUMMED:
            record[name] = sum(r[name] for r in everyone)
        for name in _LONGEST:
            record[name] = max(r[name] for r in everyone)
        for name in (name for name in own if name.endswith("_norm")):
            record[name] = math.sqrt(sum(r[name] ** 2 for r in everyone) / copies)
        if record.get("descent_norm"):  # of delay compensation, against what it corrects
            record["correction_ratio"] = record["correction_norm"] / record["descent_norm"]
        if self._stage.count > 1:
            record["stage"] = self._stage.index
        return record
