"""An order given to a run, and what comes of it in each cluster, until all have done it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsx.ctl.visit import NobodyAnswers, Visit

_LOOK_SECONDS = 0.5


class Followed:
    """What has come of an order: `is_done` in all clusters that train, or why it is not."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.step: int | None = None  # at which all do it
        self.done: dict[int, Mapping[str, Any]] = {}
        self.failed: dict[int, str] = {}
        self.gone: list[int] = []  # those whose processes have ended meanwhile


def give(
    visit: Visit,
    do: str,
    names: Sequence[str],
    say: Callable[[str], object],
    wait_seconds: float,
    ends: bool,
    **operands: Any,
) -> Followed:
    """Give an order to all clusters and follow it; `say` hears of each thing that happens.

    `ends`: the run ends by it, so clusters that do not answer any more have done it. ValueError
    where it is refused, TimeoutError if it is not done after `wait_seconds`: it stands then, too.
    """
    at = visit.met
    (answer,) = visit.ask(do, to=at, **operands).values()
    if "error" in answer:
        raise ValueError(f"{names[at]} (cluster {at}): {answer['error']}")
    followed = Followed(str(answer["id"]))
    what = " ".join([do, *(f"{operand:g}" if isinstance(operand, float) else str(operand)
                           for operand in operands.values())])  # fmt: skip
    say(
        f"asked at {names[at]} (cluster {at}); all follow at the end of one of the next rounds, "
        f"which are {answer['interval']} steps each"
    )
    until = time.monotonic() + wait_seconds
    while time.monotonic() < until:
        try:
            told = visit.ask("progress", id=followed.id)
        except NobodyAnswers:
            if ends and followed.step is not None:
                followed.gone = sorted({*range(len(names))} - {*followed.done})
                return followed
            raise
        if _take(followed, told, what, names, say, ends):
            return followed
        time.sleep(_LOOK_SECONDS)
    where = "no cluster has come to it yet" if followed.step is None else (
        f"at step {followed.step}: done by {len(followed.done)} cluster(s)"
    )  # fmt: skip
    raise TimeoutError(f"not done within {wait_seconds:g} s ({where}); the order stands")


def follow_leave(
    visit: Visit,
    cluster: int,
    names: Sequence[str],
    say: Callable[[str], object],
    wait_seconds: float,
) -> None:
    """Have a cluster leave, and follow until the others have gone on without it.

    ValueError where it is refused, TimeoutError if it is not done after `wait_seconds`.
    """
    who, until = f"{names[cluster]} (cluster {cluster})", time.monotonic() + wait_seconds
    (answer,) = visit.ask("leave", to=cluster).values()
    if "error" in answer:
        raise ValueError(f"{who}: {answer['error']}")
    if answer.get("waits"):
        say(f"{who} waits for others that are lost, and ends once it has saved")
        _follow_alone(visit, cluster, str(answer["id"]), who, say, until)
        return
    say(f"{who} saves at the end of a step, and leaves")
    saved: Mapping[str, Any] | None = None
    while time.monotonic() < until:
        told = visit.ask("status")
        own = told.get(cluster, {}).get("saved")
        if own is not None and told[cluster].get("state") in ("saving", "ending"):
            saved = own
        others = [one for id, one in told.items() if id != cluster and "view" in one]
        if others and all(cluster not in one["members"] for one in others):
            if saved is not None:
                say(f"{who}: saved at step {saved['step']}: {saved['path']}")
            left = ", ".join(f"{names[id]} (cluster {id})" for id in others[0]["members"])
            say(f"{left} go on without it, in view {others[0]['view']}")
            return
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"{who} has not left within {wait_seconds:g} s; it still may")


def _follow_alone(
    visit: Visit,
    cluster: int,
    id: str,
    who: str,
    say: Callable[[str], object],
    until: float,
) -> None:
    """Follow an order that one cluster alone has taken, and that ends it."""
    while time.monotonic() < until:
        try:
            (told,) = visit.ask("progress", to=cluster, id=id).values()
        except NobodyAnswers:
            told = {"is_gone": True}
        if told.get("state") == "done":
            saved = f"saved in {told['seconds']:.1f} s: {told['path']}"
            say(f"{who}: {saved if told['path'] else 'nothing is saved'}")
            return
        if told.get("state") == "failed":
            raise ValueError(f"{who}: {told['why']}")
        if told.get("is_gone"):
            say(f"{who} has ended")
            return
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"{who} has not ended; it still may")


def _take(
    followed: Followed,
    told: Mapping[int, Mapping[str, Any]],
    what: str,
    names: Sequence[str],
    say: Callable[[str], object],
    ends: bool,
) -> bool:
    """Take what clusters tell of it; whether nothing more is to come."""
    for id, one in sorted(told.items()):
        if followed.step is None and "step" in one:
            followed.step = one["step"]
            say(f"all clusters {what} at step {followed.step}")
        if one.get("state") == "done" and id not in followed.done:
            followed.done[id] = one
            if "path" in one:
                where = f"saved in {one['seconds']:.1f} s: {one['path']}"
                say(f"{names[id]} (cluster {id}): {where if one['path'] else 'nothing is saved'}")
        elif one.get("state") == "failed" and id not in followed.failed:
            followed.failed[id] = one["why"]
            say(f"{names[id]} (cluster {id}): {one['why']}")
    gone = [id for id, one in told.items() if one.get("is_gone")]
    over = {*followed.done, *followed.failed, *gone}
    if followed.step is None or not over >= {*told}:
        return False
    followed.gone = [id for id in gone if ends and id not in followed.done]
    return True
