"""A double of an accelerator's streams and events: on the CPU, with notes of what is asked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from dsx.core.side_stream import SideStream


@dataclass
class Stream:
    """A stream of which only the device and the priority are known."""

    device: torch.device
    priority: int


@dataclass
class Event:
    """An event that notes when it is recorded, and when it is waited for."""

    streams: CpuStreams
    blocking: bool

    def record(self, stream: Stream) -> None:
        """Note it."""
        assert self.streams.current is stream
        self.streams.note("record")

    def synchronize(self) -> None:
        """Note it."""
        self.streams.note("wait")


@dataclass
class CpuStreams:
    """In place of torch.cuda; `notes` are what was asked for, with the thread that did."""

    made: list[Stream] = field(default_factory=list[Stream])
    notes: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    events: list[Event] = field(default_factory=list[Event])
    current: Stream | None = None

    def note(self, what: str) -> None:
        """Note what is asked for, on this thread."""
        self.notes.append((what, get_ident()))

    def set_device(self, device: torch.device) -> None:
        """Note which one."""
        self.note(f"on {device}")

    def Stream(self, device: torch.device, priority: int) -> Any:  # noqa: N802
        """Return a stream."""
        self.made.append(Stream(device, priority))
        return self.made[-1]

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802
        """Return an event."""
        self.events.append(Event(self, blocking))
        return self.events[-1]

    @contextmanager
    def stream(self, stream: Any) -> Generator[None, None, None]:
        """Make it the current one."""
        before, self.current = self.current, stream
        self.note("begin")
        try:
            yield
        finally:
            self.current = before


def on_the_side() -> SideStream:
    """A side stream that computes on the CPU."""
    return SideStream(torch.device("cpu"), CpuStreams())
