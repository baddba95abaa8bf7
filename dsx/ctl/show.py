"""What `dsx ctl status` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Answers = Mapping[int, Mapping[str, Any]]


def headline(answers: Answers, asked: int, names: Sequence[str]) -> str:
    """Return the line above the table: the view, who leads the log, which run it is."""
    told = answers.get(asked, {})
    words: list[str] = []
    if "session" in told:
        words.append(f"run {told['session']}")
    if told.get("view") is not None:
        members = ", ".join(str(id) for id in told["members"])
        words.append(f"view {told['view']} of clusters {members}")
        leader = told.get("coordinator")
        leads = "nobody leads the log" if leader is None else f"led by {_named(leader, names)}"
        words.append(leads)
        if told.get("waits_for"):
            words.append(f"waits for clusters {', '.join(map(str, told['waits_for']))}")
    words.append(f"asked {_named(asked, names)}")
    return "; ".join(words)


def status_table(answers: Answers, asked: int, names: Sequence[str]) -> Table:
    """Return a row for each cluster."""
    table = Table()
    titles = ("cluster", "state", "step", "round", "under way", "last word", "saved at", "dsx")
    for title in titles:
        table.add_column(title)
    members = answers.get(asked, {}).get("members")
    for id in sorted(answers):
        table.add_row(*_row(id, answers[id], answers.get(asked, {}), members, names))
    return table


def state_of(id: int, told: Mapping[str, Any], members: Sequence[int] | None) -> str:
    """Return what a cluster does, in a word or a few."""
    if "error" not in told and (waiting := told.get("waiting")):
        named = ", ".join(map(str, waiting["clusters"]))
        return f"{told['state']}: for {named}, ends in {waiting['seconds']:.0f} s"
    if "error" not in told:
        return str(told["state"])
    if members is not None and id not in members:
        return f"out: {told['error']}"
    return f"lost: {told['error']}" if told.get("is_gone") else f"silent: {told['error']}"


def _row(
    id: int,
    told: Mapping[str, Any],
    asked: Mapping[str, Any],
    members: Sequence[int] | None,
    names: Sequence[str],
) -> list[str]:
    heard = asked.get("heard_seconds", {}).get(str(id))
    under_way = [f"{one['fragment']}@{one['launched']}" for one in told.get("under_way", [])]
    orders = [f"{o['do']}: {o['state']}" for o in told.get("orders", [])]
    saved = told.get("saved")
    return [
        _named(id, names),
        state_of(id, told, members),
        str(told.get("step", "")),
        str(told.get("round", "")),
        "; ".join([", ".join(under_way), *orders]).strip("; "),
        "asked" if told is asked else "" if heard is None else f"{heard:.1f} s ago",
        "" if saved is None else str(saved["step"]),
        str(told.get("versions", {}).get("dsx", "")),
    ]


def _named(id: int, names: Sequence[str]) -> str:
    return f"{id} {names[id]}"
