"""What a rank's process holds, and what its links to other clusters are like.

It is asked for every some seconds on the thread that writes records, so that training waits for
none of it: neither for the system nor for the allocator of a device.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dsx.comm.world import World
from dsx.outer.loop import OuterLoop
from dsx.telemetry.measured_rates import MeasuredRates

_SECONDS = 10.0  # between two looks
_RESIDENT = 1  # the place of what is resident in statm, in pages


class Machine:
    """One rank's; `read` is for any thread, `is_due` for training's."""

    def __init__(
        self,
        world: World,
        loop: OuterLoop,
        planned_bytes: int,
        measured: MeasuredRates | None = None,
        seconds: float = _SECONDS,
    ) -> None:
        """`planned_bytes` is what outer training was to allocate."""
        self._planned_bytes, self._measured = planned_bytes, measured
        self._allocator = loop.state.allocator
        self._link, others = world.link, (world.seat.ids[peer] for peer in world.seat.others)
        self._names = [(cluster, world.rank) for cluster in others]
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._seconds, self._due_at = seconds, 0.0

    def is_due(self) -> bool:
        """Whether it is time for another look, from which on the next one is waited for."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + self._seconds
        return True

    def read(self) -> dict[str, Any]:
        """Return bytes by who holds them, and `links`, one to each cluster that has been met.

        `outer_bytes` is what outer training has allocated, and `process_bytes` what the process has
        of the host's memory; `device_bytes` what torch holds of an accelerator, of which tensors
        took `device_peak_bytes` at most, and `device_total_bytes` is all that it has. Where the
        line was measured, `measured_bytes_per_second` is what it gave, of each link, too.
        """
        found: dict[str, Any] = {
            "outer_bytes": sum(self._allocator.given.values()),
            "outer_planned_bytes": self._planned_bytes,
        }
        with suppress(OSError, IndexError, ValueError):  # no such file here
            pages = Path("/proc/self/statm").read_text().split()[_RESIDENT]
            found["process_bytes"] = int(pages) * os.sysconf("SC_PAGE_SIZE")
        if self._device is not None:
            cuda = torch.cuda
            found |= {
                "device_bytes": cuda.memory_reserved(self._device),
                "device_peak_bytes": cuda.max_memory_allocated(self._device),
                "device_total_bytes": cuda.get_device_properties(self._device).total_memory,
            }
        if self._measured is not None:
            found["measured_bytes_per_second"] = self._measured.line
        links = self._links()
        return {**found, "links": links} if links else found

    def _links(self) -> list[dict[str, Any]]:
        links: list[dict[str, Any]] = []
        for cluster, rank in self._names if self._link is not None else ():
            assert self._link is not None
            figures = self._link.figures((cluster, rank))
            if figures is not None:
                one: dict[str, Any] = {"to": cluster, "sent_bytes": figures.sent_bytes}
                one["received_bytes"] = figures.received_bytes
                if figures.least_seconds:
                    one["round_trip_seconds"] = figures.last_seconds
                    one["least_seconds"] = figures.least_seconds
                if self._measured is not None and cluster in self._measured.links:
                    one["measured_bytes_per_second"] = self._measured.links[cluster]
                links.append(one)
        return links
