"""How many files this process may have open: raised to what is needed, or refused with numbers.

Each connection is one. The soft limit of a shell is often 1,024; the hard one bounds it.
"""

from __future__ import annotations

import os
from contextlib import suppress

SPARE = 256  # for all that is neither a rank's connection nor a caller's


def raise_file_limit(needed: int, why: str) -> None:
    """Let this process hold so many open files; ValueError says `why` they are needed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{why} may take {needed} open files, and this process may have {hard}: raise that "
            "(`ulimit -Hn`, or LimitNOFILE of a service), or allow fewer connections"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def make_room(connections: int, why: str) -> None:
    """Let this process open so many connections beside what it has open; before it does so.

    ValueError says `why` they are needed.
    """
    num_open = 0
    with suppress(OSError):  # no /proc: what is open is taken for part of what is spared
        num_open = len(os.listdir("/proc/self/fd"))
    raise_file_limit(num_open + connections + SPARE, why)


def take_all_room() -> None:
    """Let this process have as many open files as its user may: it does not know who will call."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
