"""What is done to a run of torchft: a fault of dsx's run, at its time, to the same cluster.

A fault comes when it has come in dsx's run, counted from when all trained, or once those who are
left have gone on after the one before, whichever is later: nobody is hit who has not recovered.
Who leads is the lighthouse, so kill_leader kills that, and it is started again at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

from dsx.bench.chaos.against.groups import Groups
from dsx.bench.chaos.against.job import LIGHTHOUSE
from dsx.bench.chaos.faults import Fault, Kind, comes_back_at_once
from dsx.bench.chaos.logs import Window


def inflict(
    groups: Groups,
    faults: Sequence[Fault],
    fault_seconds: Sequence[float],
    kinds: Sequence[Kind],
    comes_back: bool,
) -> Iterator[tuple[Window, float]]:
    """Do one fault after another; yield each when it is over, and how late it was, in seconds."""
    began = time.monotonic()
    for fault, seconds in zip(faults, fault_seconds, strict=False):
        while (left := began + seconds - time.monotonic()) > 0:
            groups.look()
            time.sleep(min(left, 0.02))
        yield _suffer(groups, fault, kinds, comes_back), max(0.0, -left)


def _suffer(groups: Groups, fault: Fault, kinds: Sequence[Kind], comes_back: bool) -> Window:
    """Do one, and wait until all have gone on, whoever comes back among them; NoProgress if not."""
    cluster, began, what = fault.cluster, time.monotonic(), f"{fault}"
    befalls = cluster
    if fault.kind == "kill_leader":
        befalls = LIGHTHOUSE
        for pid in groups.processes_of(LIGHTHOUSE):
            os.kill(pid, signal.SIGKILL)
        groups.until(lambda: not groups.processes_of(LIGHTHOUSE), f"{what}: it stays")
        groups.launch(LIGHTHOUSE)
    elif fault.kind == "pause":
        _pause(groups, cluster, fault.seconds)
    elif fault.kind == "join":
        if cluster not in groups.alive:
            groups.bring_back(cluster)
    else:
        groups.alive.remove(cluster)
        sign = signal.SIGTERM if fault.kind == "leave" else signal.SIGKILL
        for pid in groups.processes_of(cluster):
            os.kill(pid, sign)
        groups.until(lambda: not groups.processes_of(cluster), f"{what}: it stays")
    groups.look()
    groups.until_all_go_on(what)
    if cluster not in groups.alive and comes_back_at_once(fault.kind, kinds, comes_back):
        groups.bring_back(cluster)
    return Window(fault.kind, befalls, began, time.monotonic())


def _pause(groups: Groups, cluster: int, seconds: float) -> None:
    own = groups.processes_of(cluster)
    try:
        for pid in own:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        for pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
