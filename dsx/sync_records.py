"""Records of syncs for a whole cluster, gathered from its ranks without a collective.

A rank knows only its shard: it may own nothing of a fragment. Each rank posts its numbers to the
cluster's own key-value store one boundary after the sync (tensors are ready by then, so nothing
stalls an accelerator), and rank 0 reads them one boundary later, when the inner engine's own
gradient reduction has shown that every rank has passed the posting.

Bytes add up, seconds are the longest of any rank, and norms are those of the whole fragment: the
squares add up, divided by how many times the cluster holds each element (ZeRO-0 replicates).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from dsx.comm.base import PeerLost

_SUMMED = ("bytes_sent",)
_LONGEST = ("wait_seconds", "transfer_seconds")


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

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        ...


class SyncRecords:
    """One rank's part in its cluster's records; `write` is called on rank 0 only."""

    def __init__(
        self,
        store: KeyValueStore,
        ranks: tuple[int, int],
        fragment_numel: Sequence[int],
        write: Callable[[Mapping[str, Any]], None],
        deadline_seconds: float,
        is_enabled: bool = True,
    ) -> None:
        self._store = store
        self._rank, self._num_ranks = ranks
        self._fragment_numel = fragment_numel
        self._write = write
        self._is_enabled = is_enabled
        self._deadline = timedelta(seconds=deadline_seconds)
        self._fresh: list[Mapping[str, Any]] = []
        self._ready: list[Mapping[str, Any]] = []
        self._posted: list[tuple[str, dict[str, Any]]] = []
        self.bytes_sent = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep what the loop says of a sync; its tensors may still be computing."""
        if self._is_enabled:
            self._fresh.append(event)

    def pass_boundary(self) -> None:
        """Write what was posted a boundary ago, then post what came the boundary before."""
        if self._rank == 0:
            for key, own in self._posted:
                self._write(self._combine(key, own))
        self._posted = [self._post(event) for event in self._ready]
        self._ready, self._fresh = self._fresh, []

    def flush(self) -> None:
        """Write everything now; rank 0 waits for the others, which must flush, too."""
        for _ in range(3):
            self.pass_boundary()

    def _post(self, event: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        own = {k: v.item() if hasattr(v, "item") else v for k, v in event.items()}
        key = f"sync/{own['fragment']}/{own['launched_step']}"
        if self._rank:
            self._store.set(f"{key}/{self._rank}", json.dumps(own))
        return key, own

    def _combine(self, key: str, own: dict[str, Any]) -> dict[str, Any]:
        keys = [f"{key}/{rank}" for rank in range(1, self._num_ranks)]
        try:
            if keys:
                self._store.wait(keys, self._deadline)
            everyone = [own, *(json.loads(self._store.get(k)) for k in keys)]
        except RuntimeError as error:
            raise PeerLost(
                f"fragment {own['fragment']} applied at step {own['applied_step']}: a rank of this "
                f"cluster has not posted its record within {self._deadline.total_seconds():g} s"
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
        self.bytes_sent += record["bytes_sent"]
        return record
