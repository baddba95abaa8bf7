"""Logs of a run of three clusters of two ranks, as its ranks write them where nothing is wrong."""

from __future__ import annotations

from typing import Any, Literal

from dsx.bench.chaos.logs import Record, Window
from dsx.bench.chaos.plan import Plan

Logs = dict[tuple[int, int], list[Record]]
PLAN = Plan(interval=4, in_turns=True)  # of two fragments
LAST_STEP = 12
KILL, LEAVE = Window("kill_cluster", 1, 6.25, 8.0), Window("leave", 1, 6.25, 8.0)
GONE_AT, BACK_AT = 6, 9
Ending = Literal["killed", "left"]


def sound(ending: Ending | None = None, is_back: bool = False) -> Logs:
    """Twelve steps, at whose times they are taken; H 4, two fragments, a sample a step.

    Cluster 1 may be killed behind step 6, before its launch there is averaged: it has read two
    samples for nothing, which clusters 0 and 2 read again in step 8. Or it leaves behind step 7,
    with one sample that is in none of its launches, which cluster 0 reads again in step 8. It may
    be back at step 9.
    """
    logs: Logs = {}
    for cluster in range(3):
        for rank in range(2):
            is_first = not (ending and cluster == 1)
            log = _process(cluster, rank, 1, LAST_STEP, ending, is_back, is_first)
            if not is_first:
                gone = GONE_AT + (ending == "left")
                log = _process(cluster, rank, 1, gone, ending, is_back, False)
                if ending == "left":
                    log.append({"what": "left", "at": 7.2, "saved": [7]})
                log.append({"what": "exit", "at": 7.4, "status": 0 if ending == "left" else -9})
                if is_back:
                    log += _process(cluster, rank, BACK_AT, LAST_STEP, ending, True, True)
            logs[cluster, rank] = log
    return logs


def _process(
    cluster: int, rank: int, first: int, last: int, ending: Ending | None, is_back: bool, ends: bool
) -> list[Record]:
    log: list[Record] = [
        {"what": "begin", "at": first - 0.5},
        {"what": "fragments", "at": first - 0.4, "count": 2, "stage": [0, 1]},
    ]
    for step in range(first, last + 1):
        samples = [step * 3 + cluster]
        if step == 8 and ending == "killed" and cluster != 1:
            samples.append({0: 5, 2: 6}[cluster] * 3 + 1)
        elif step == 8 and ending == "left" and cluster == 0:
            samples.append(7 * 3 + 1)
        log.append({
            "what": "step", "at": float(step), "step": step, "seconds": 0.5, "samples": samples,
            "members": _members(step, ending, is_back), "leader": None if rank else 0,
        })  # fmt: skip
        if step % 2:
            continue
        of: dict[str, Any] = {"fragment": 0 if step % 4 else 1, "step": step}
        log.append({"what": "launch", "at": step + 0.1, **of, "is_spoilt": False})
        averaged = _averaged(step, ending, is_back)
        if cluster in averaged:
            log.append({
                "what": "commit", "at": step + 0.2, **of, "by": [], "members": averaged,
                "hash": f"{rank} {of}",
            })  # fmt: skip
    if ends:
        log.append({
            "what": "end", "at": 13.0, "step": LAST_STEP, "loss": 0.25, "hash": "the model",
            "members": _members(LAST_STEP, ending, is_back), "rounds": [3, 3],
        })  # fmt: skip
        log.append({"what": "exit", "at": 13.5, "status": 0})
    return log


def _members(step: int, ending: Ending | None, is_back: bool) -> list[int]:
    is_there = not ending or step <= GONE_AT + 1 or (is_back and step >= BACK_AT)
    return [0, 1, 2] if is_there else [0, 2]


def _averaged(step: int, ending: Ending | None, is_back: bool) -> list[int]:
    """Return who is in the mean of a launch: of step 6 one that leaves, not one that is killed."""
    if ending == "killed" and step == GONE_AT:
        return [0, 2]
    return _members(step, ending, is_back)


def the(log: list[Record], what: str, **fields: Any) -> Record:
    """Return the one record of a kind with these fields."""
    (found,) = [r for r in log if r["what"] == what and fields.items() <= r.items()]
    return found


def without(log: list[Record], record: Record) -> None:
    """Take a record out."""
    log[:] = [other for other in log if other is not record]
