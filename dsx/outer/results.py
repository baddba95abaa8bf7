"""Results of transfers, kept for a cluster that heals: what it takes in place of averaging itself.

They are kept from their commit on, while somebody heals, and let go once he has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any

from torch import Tensor

from dsx.outer.attempt import Attempt
from dsx.outer.channel import FragmentChannel, common_slots
from dsx.outer.parcel import Parcel

_OWN = ("is_idle", "anchor", "square", "differing", "sums")  # of one cluster, or made at the apply


class Results:
    """One rank's; `keep` is called on the transfers' threads, the rest on any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_kept = False
        self._kept: dict[int, tuple[Attempt, dict[str, Any], dict[str, Tensor]]] = {}
        self._parcels: dict[int, Parcel] = {}

    @property
    def num_bytes(self) -> int:
        """What they take."""
        with self._lock:
            every = [t for _, _, tensors in self._kept.values() for t in tensors.values()]
        return sum(t.numel() * t.element_size() for t in every)

    def begin(self) -> None:
        """Keep what is committed from now on."""
        with self._lock:
            self._is_kept = True

    def end(self) -> None:
        """Keep nothing, and let go of what there is."""
        with self._lock:
            self._is_kept = False
            self._kept.clear()
            self._parcels.clear()

    def keep(self, attempt: Attempt, channel: FragmentChannel, mean: Tensor) -> None:
        """Keep the result of an attempt that has just ended, if anybody heals."""
        if self._is_kept:
            self._keep(attempt, mean, common_slots(channel))

    def keep_arrived(self, attempt: Attempt, channel: FragmentChannel) -> bool:
        """Keep what has come before `begin` and has not been applied; False if too much is gone."""
        with self._lock:
            is_there = attempt.what.number in self._kept
        if is_there or common_slots(channel):
            return is_there
        self._keep(attempt, attempt.buffers.wire, {})
        return True

    def _keep(self, attempt: Attempt, mean: Tensor, slots: Mapping[str, Tensor]) -> None:
        buffers = attempt.buffers
        tensors = {"mean": mean, "sideband": buffers.sideband.values}
        tensors |= {f"codec.{name}": slot for name, slot in slots.items()}
        parity = {k: v for k, v in asdict(buffers.parity).items() if k not in _OWN}
        values = {"fragment": attempt.what.fragment, "round": attempt.round, "parity": parity}
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        with self._lock:
            self._kept[attempt.what.number] = attempt, values, copies

    def has(self, number: int) -> bool:
        """Whether a launch's result is kept."""
        with self._lock:
            return number in self._kept

    def parcel(self, number: int) -> Parcel | None:
        """Return a result; None while there is none, or it is not committed."""
        with self._lock:
            if number not in self._kept:
                return None
            attempt, values, tensors = self._kept[number]
            if attempt.pending is None or not attempt.pending.has_arrived:
                return None
            if number not in self._parcels:
                notes = {str(id): text.decode() for id, text in attempt.pending.notes.items()}
                self._parcels[number] = Parcel({**values, "notes": notes}, tensors)
            return self._parcels[number]

    def drop(self, numbers: set[int]) -> None:
        """Let go of some."""
        with self._lock:
            for number in numbers:
                self._kept.pop(number, None)
                self._parcels.pop(number, None)

    @property
    def numbers(self) -> set[int]:
        """The launches whose results are kept."""
        with self._lock:
            return {*self._kept}
