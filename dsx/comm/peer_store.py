"""A key-value store without a place: what peers have set is asked of them, over a common group.

gloo finds its connections through a store. The first group of a transport does so where clusters
have met; the others would ask there again, all ranks of all clusters at once. They tell each other
over the first group instead: per group one exchange between those who are to be connected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SECONDS = timedelta(seconds=600)


class PeerStore(dist.Store):
    """One rank's view. All peers set their keys first, and then read those of all others.

    `exchange` returns what each peer gives, by position, and is called once between a rank's sets
    and its reads: every rank does the same, in the same order. RuntimeError for a key that nobody
    has set, PeerLost as `exchange` raises it.
    """

    def __init__(self, exchange: Callable[[dict[str, str]], Sequence[dict[str, str]]]) -> None:
        super().__init__()
        self._exchange = exchange
        self._values: dict[str, bytes] = {}
        self._untold: dict[str, str] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value, which the peers get when they look for theirs."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._untold[key] = data.hex()

    def get(self, key: str) -> bytes:
        """Return a value."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are known here; asks nobody."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = _SECONDS) -> None:
        """Return once the keys are here; `exchange` keeps the deadline, not `timeout`."""
        if not self.check(keys) and self._untold:
            own, self._untold = self._untold, {}
            for told in self._exchange(own):
                self._values |= {key: bytes.fromhex(text) for key, text in told.items()}
        if not self.check(keys):
            missing = [key for key in keys if key not in self._values]
            raise RuntimeError(f"no peer has set {', '.join(missing)}")
