"""What ends before the interpreter does: threads that are now and then inside torch's C++.

A daemon thread that comes back from there (with a store's answer, a message of gloo's, the result
of an operation) while the interpreter is torn down is ended by it on the spot, in the midst of C++
that must not be left so: "terminate called without an active exception", and SIGABRT in place of
the exit status. So whoever has such a thread ends it before, also where a script has not closed
what it belongs to.
"""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from typing import Protocol


class Closes(Protocol):
    """What has such a thread; `close` returns once that has ended, or some seconds are over."""

    def close(self) -> None:
        """End it."""
        ...


_open: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_at_exit(one: Closes) -> None:
    """Close it before the interpreter ends, unless that is done by then."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # before what was registered until now, as a link that it uses
    _open.add(one)


def has_closed(one: Closes) -> None:
    """Take that it has been closed."""
    _open.discard(one)


def _close_all() -> None:
    for one in [*_open]:
        if one in _open:  # else another one has closed it
            has_closed(one)
            with suppress(Exception):
                one.close()
