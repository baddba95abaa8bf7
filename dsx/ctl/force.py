"""A view that an operator forces, where a run has lost its quorum and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsx.ctl.visit import Visit

_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """Clusters of `view` that go on, all of which wait, and those that are left out."""

    view: int
    goes_on: tuple[int, ...]
    without: tuple[int, ...]

    def question(self, names: Sequence[str]) -> str:
        """Return what it means, and what it risks."""
        stay, out = _named(self.goes_on, names), _named(self.without, names)
        return (
            f"{stay} wait(s) in view {self.view}, and would go on without {out}.\n"
            f"Make sure that all processes of {out} have ended. If they run still, behind a line "
            "that is cut, they may be forced or go on as well: then there are TWO RUNS that learn "
            "apart, and nothing brings them together again. Whoever waits there is told that it "
            "was left out, ends, and joins once it is started again; what only it has learnt since "
            "is lost."
        )

    @property
    def word(self) -> str:
        """Return what is typed to confirm it."""
        return f"without {' '.join(map(str, self.without))}"


def plan(visit: Visit, names: Sequence[str], without: Sequence[int], stays: Sequence[int]) -> Plan:
    """Return what is to be forced; ValueError, which says why, where nothing is."""
    told = visit.ask("status")
    waiting = {id: one for id, one in told.items() if one.get("waiting")}
    if not waiting:
        raise ValueError("no cluster that answers waits for others: nothing is to be forced")
    first = next(iter(waiting.values()))
    view, members = int(first["view"]), [int(id) for id in first["members"]]
    out = sorted({*without}) if without else sorted({*members} - {*stays})
    goes_on = tuple(id for id in members if id not in out)
    if unknown := sorted(({*out} | {*stays}) - {*members}):
        raise ValueError(f"clusters {unknown} are not in view {view} of clusters {members}")
    if not out or not goes_on:
        raise ValueError(f"of clusters {members} some have to go on, and some not")
    for id in goes_on:
        if id not in waiting:
            why = told[id].get("error") or f"its state is {told[id].get('state')}"
            raise ValueError(
                f"{_named([id], names)} does not wait ({why}): all that go on have to, and to be "
                "reached from here; if it is lost, too, leave it out as well"
            )
        if waiting[id]["view"] != view:
            raise ValueError(
                f"{_named([id], names)} is in view {waiting[id]['view']}, not {view}: ask again"
            )
    return Plan(view, goes_on, tuple(out))


def force(
    visit: Visit,
    made: Plan,
    names: Sequence[str],
    say: Callable[[str], object],
    wait_seconds: float,
) -> None:
    """Tell all that go on, and follow until they do.

    ValueError where one refuses, TimeoutError if it is not done after `wait_seconds`.
    """
    operands: dict[str, Any] = {"without": list(made.without), "view": made.view}
    told = visit.ask("force_view", branch=time.time_ns(), **operands)
    refused = {id: told[id]["error"] for id in made.goes_on if "error" in told.get(id, {})}
    if refused:
        whys = "; ".join(f"{_named([id], names)}: {why}" for id, why in refused.items())
        raise ValueError(f"{whys}; give the order again once that is mended")
    until = time.monotonic() + wait_seconds
    while time.monotonic() < until:
        states: Mapping[int, Mapping[str, Any]] = visit.ask("status")
        views = [states[id] for id in made.goes_on if states[id].get("view", 0) > made.view]
        if len(views) == len(made.goes_on):
            say(f"{_named(made.goes_on, names)} go(es) on, in view {views[0]['view']}")
            return
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"not done within {wait_seconds:g} s; it still may be")


def _named(ids: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join(f"{names[id]} (cluster {id})" for id in ids)
