"""What the simulated accelerator tells of: waits and calls to other devices, by dsx's lines."""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsx

PACKAGE = Path(dsx.__file__).parent
_DEPTH = 3  # lines of dsx that are shown of a call

_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_own_device = -1


@dataclass(frozen=True)
class Note:
    """Something a GPU would have done unseen; `lines` are dsx's, the innermost first."""

    kind: str  # "wait", "pageable" or "elsewhere"
    what: str
    thread: str
    lines: tuple[str, ...]


taken: list[Note] = []


def listen(library: Any) -> None:
    """Take notes of all that the accelerator's library tells."""
    global _library
    _library = library
    library.simulated_listen(_told)


def keep_to(device: int) -> None:
    """Note each call to another device than `device` from here on."""
    global _own_device
    _own_device = device
    _library.simulated_keep_to(device)


def note_if_elsewhere(device: int, what: str) -> None:
    """Note that something goes to `device`, where that is another than the rank's own."""
    if _own_device >= 0 and device != _own_device:
        _take("elsewhere", f"{what} on device {device}")


def of_training() -> list[Note]:
    """Return what lines of dsx have made the training thread wait for, or stage."""
    main = threading.main_thread().name
    return [n for n in taken if n.kind != "elsewhere" and n.thread == main and n.lines]


def elsewhere() -> list[Note]:
    """Return what went to another device than the rank's own, whoever did it."""
    return [note for note in taken if note.kind == "elsewhere"]


@_LISTENER
def _told(kind: bytes, what: bytes) -> None:
    _take(kind.decode(), what.decode())


def _take(kind: str, what: str) -> None:
    taken.append(Note(kind, what, _thread_name(), _lines_of_dsx()))


def _thread_name() -> str:
    """Return the thread's name; one that was not started by Python has none."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return known.get(threading.get_ident(), "one of torch's")


def _lines_of_dsx() -> tuple[str, ...]:
    lines: list[str] = []
    frame = sys._getframe()
    while frame is not None and len(lines) < _DEPTH:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            lines.append(f"{path.relative_to(PACKAGE)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)
