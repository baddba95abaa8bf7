"""Who is which cluster: an id belongs to the first process that claims it, for as long as it lives.

Two launchers may be given the same id by mistake. Without a claim the second one would take the
place of the first in the store, and all would wait for the wrong one. Whether who has claimed it is
alive is known from the process, on the same machine, and otherwise from a count that a thread of it
raises every few seconds: a dead one, which a store of its own outlives, is in nobody's way.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsx.core.waits import waiting_for

_BEAT_SECONDS = 5.0  # a slow line carries them, too
_LAST_ANSWER_SECONDS = 5.0
_WATCH_SECONDS = 15.0  # without a beat: it is dead
_POLL_SECONDS = 0.1
_NOT_THERE = "-"
logger = logging.getLogger(__name__)


def claim(store: dist.Store, beats: dist.Store, cluster_id: int, nonce: str) -> Callable[[], None]:
    """Claim a cluster's id for this process; ValueError names who has it and is alive.

    What is returned raises the same where another process has since taken this one for dead.

    `beats` is another connection to the same key space, for the thread that tells of this process.
    """
    key, seen = f"claim/{cluster_id}", ""
    own = json.dumps({"nonce": nonce, "pid": os.getpid(), **_place(os.getpid())})
    while (found := store.compare_set(key, seen, own).decode()) != own:
        other = json.loads(found)
        if is_alive(store, other):
            raise refusal_of(cluster_id, other)
        seen = found
    _start_beating(beats, f"beat/{nonce}")

    def require_held() -> None:
        now = json.loads(store.get(key))
        if now["nonce"] != nonce and now["pid"] != os.getpid():
            raise refusal_of(cluster_id, now)

    return require_held


def refusal_of(cluster_id: int, claimed: dict[str, Any]) -> ValueError:
    """Return the error for a second process with a cluster's id."""
    return ValueError(
        f"cluster {cluster_id} is taken by process {claimed['pid']} on {claimed['host']}, which is "
        f"alive: two launchers have cluster_id {cluster_id}; give every cluster an id of its own "
        "(--dsx-cluster-id), or end the other one first"
    )


def holder(store: dist.Store, cluster_id: int) -> dict[str, Any] | None:
    """Return who has claimed an id, dead or alive; None if nobody has."""
    key = f"claim/{cluster_id}"
    return json.loads(store.get(key)) if store.check([key]) else None


def is_alive(store: dist.Store, claimed: dict[str, Any]) -> bool:
    """Whether who has claimed an id is alive; this process itself is in nobody's way.

    Takes up to fifteen seconds where it is on another machine.
    """
    here = _place(claimed["pid"])
    if claimed["machine"] and claimed["machine"] == here["machine"]:
        runs = here["started"] != _NOT_THERE and here["started"] == claimed["started"]
        return runs and claimed["pid"] != os.getpid()
    key, until = f"beat/{claimed['nonce']}", time.monotonic() + _WATCH_SECONDS
    before = store.add(key, 0)
    with waiting_for(f"a sign of life of process {claimed['pid']}", _WATCH_SECONDS):
        while time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            if store.add(key, 0) != before:
                return True
    return False


def _start_beating(store: dist.Store, key: str) -> None:
    """Raise the count until this process ends.

    An interpreter that ends while a thread waits for the store's answer would abort when that
    comes, which on a long line is likely; so its end waits for the answer, some seconds at most.
    """
    ends = threading.Event()
    thread = threading.Thread(target=_beat, args=(store, key, ends), name="dsx-claim", daemon=True)

    def end() -> None:
        ends.set()
        thread.join(_LAST_ANSWER_SECONDS)

    thread.start()
    atexit.register(end)


def _beat(store: dist.Store, key: str, ends: threading.Event) -> None:
    try:
        while not ends.is_set():
            store.add(key, 1)
            ends.wait(_BEAT_SECONDS)
    except RuntimeError:
        logger.debug("the rendezvous store has ended")


def _place(pid: int) -> dict[str, str]:
    """Return where a process is: its machine, as far as numbers of processes go, and its start."""
    machine, started = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = "" if fields[0] == "Z" else fields[19]
    return {"host": socket.gethostname(), "machine": machine, "started": started or _NOT_THERE}
