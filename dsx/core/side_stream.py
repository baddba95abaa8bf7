"""A stream of an accelerator that a rank's transfers compute on, beside training's.

It has the lowest priority that there is, which is the default stream's, too: an accelerator knows
none below. So what runs here runs in short pieces. One thread starts all of it, so that libraries
open one handle and one workspace; it waits by an event that blocks, which takes no core, and for
its own stream alone. No stream of training waits for this one, nor this one for those: what it
reads is on the host, and has come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from dsx.core.buffers import Buffers
from dsx.core.fifo import Fifo

_LOWEST = 0  # larger ones are clamped to it, smaller ones are above it
_T = TypeVar("_T")


class Streams(Protocol):
    """What makes streams and events: `torch.cuda`."""

    def set_device(self, device: torch.device) -> None:
        """Let the thread work on `device`; on another its streams would be those of the first."""
        ...

    def Stream(self, device: torch.device, priority: int) -> Any:  # noqa: N802
        """Return a new stream."""
        ...

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802
        """Return a new event, to be recorded and waited for."""
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Let the thread start on `stream` what it starts on its device."""
        ...


class SideStream:
    """One rank's, on `device`; `buffers` are the memory there that its calls work in, in turn.

    Its thread ends with it.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.device = device
        self.buffers = Buffers(device)
        self._streams: Streams = streams or torch.cuda  # pyright: ignore[reportAttributeAccessIssue]
        self._stream = self._streams.Stream(device, priority=_LOWEST)
        self._thread = Fifo("dsx-side-stream")
        # not at exit: who still waits then would wait for ever
        weakref.finalize(self, self._thread.end_soon).atexit = False
        # a thread begins on the first device, and leaving a stream of another selects it again,
        # which makes a context of this process there
        self._result_of(lambda: self._streams.set_device(self._stream.device))

    def run(self, call: Callable[[], _T]) -> _T:
        """Return what `call` does, on the stream, once the device has done what it has started.

        An error is raised then, too: memory of the host that copies read or write is free again.
        For any thread but the training thread, which would wait.
        """
        return self._result_of(lambda: self._on_stream(call))

    def _result_of(self, task: Callable[[], _T]) -> _T:
        future = Future[_T]()
        self._thread.submit(future, task)
        return future.result()

    def _on_stream(self, call: Callable[[], _T]) -> _T:
        with self._streams.stream(self._stream):
            done = self._streams.Event(blocking=True)
            try:
                return call()
            finally:
                done.record(self._stream)
                done.synchronize()
