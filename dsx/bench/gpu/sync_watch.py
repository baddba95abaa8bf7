"""Where dsx makes the training thread wait for the device.

CUDA's sync warnings tell of torch's operations; waits for events and streams, which give none, are
counted as they are called. Of each the place is the innermost line of dsx. What other threads wait
for is their own affair.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dsx

_OURS = str(Path(dsx.__file__).parent)
_SELF = str(Path(__file__).parent)
# the numbers of a sync, read a step later: they are there, but for a host that is further ahead
_LATE = "core/host_numbers.py"


def watched(
    step: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    syncs: collections.Counter[str],
) -> torch.Tensor:
    """Take a step; count the waits in it, by place, into `syncs`."""

    def note(*args: Any, **kwargs: Any) -> None:
        place = place_of_call()
        if place is not None and not place.startswith(_LATE):
            syncs[place] += 1

    def warned(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchronizing" in str(message):
            note()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with noted(torch.cuda.Event, note), noted(torch.cuda.Stream, note):
                return step(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def noted(kind: Any, note: Callable[[], object]) -> Any:
    """Return what has `note` called before each `synchronize` of a kind of object."""
    original = kind.synchronize

    def synchronize(self: Any) -> None:
        note()
        original(self)

    return mock.patch.object(kind, "synchronize", synchronize)


def place_of_call() -> str | None:
    """Return the innermost line of dsx, but for this bench, that has led here; None in a thread of
    its own, or where none has.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS) and not name.startswith(_SELF):
            return f"{os.path.relpath(name, _OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
