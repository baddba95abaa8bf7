"""Workers that a rank forks, as a DataLoader does, end with it, however it ends.

A rank that is killed leaves them behind: they look for their parent every few seconds only, and
keep open until then what they have inherited (see sockets.py), so that a restart finds its port in
use. Linux can end them at once. That is of the thread which forks them, so only workers forked by
the main thread are bound; and only those of multiprocessing, as another child may be meant to stay.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import util

_PR_SET_PDEATHSIG = 1


class _Watch:
    """What forks of this process know of the thread that forked them."""

    def __init__(self) -> None:
        self.is_of_main_thread = False
        self.libc = ctypes.CDLL(None)

    def look(self) -> None:
        """Note which thread is about to fork."""
        self.is_of_main_thread = threading.current_thread() is threading.main_thread()

    def bind(self) -> None:
        """End this process with its parent; in a worker, before it runs anything else."""
        if not self.is_of_main_thread:
            return
        self.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != os.getppid():  # it has ended meanwhile
            os._exit(1)


_watch: _Watch | None = None


def end_workers_with_parent() -> None:
    """Bind workers that are forked from now on to this process; once, where it is Linux."""
    global _watch  # hooks of a process are its own and stay
    if _watch is None and sys.platform == "linux":
        _watch = _Watch()
        os.register_at_fork(before=_watch.look)
        util.register_after_fork(_watch, _Watch.bind)
