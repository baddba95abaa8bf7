"""Some records in words, the same wherever a run is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.core.units import format_bytes


def said_of_heal(record: Mapping[str, Any]) -> str:
    """Say how a cluster came back, by a sound record of it."""
    copied, held, since = (
        int(record.get(f"{name}_bytes") or 0) for name in ("copied", "held", "results")
    )
    told = f"{format_bytes(copied)} of {format_bytes(copied + held)} copied from them"
    if held:
        told += ", the rest from its own checkpoint"
    told += f"; {format_bytes(since)} of their results since"
    if "seconds" in record:
        told += f"; in {record['seconds']:.3g} s"
    return f"came to the others at step {record['step']:,}: {told}"


def said_of_memory(held: Mapping[int, Mapping[str, float]]) -> str:
    """Say what first ranks have held at most, by cluster, under the names of their records.

    Empty where nobody has told.
    """
    said: list[str] = []
    for name, what in (("process_bytes", "processes"), ("device_bytes", "devices")):
        told = [
            f"{format_bytes(one[name])} (cluster {m})" for m, one in held.items() if name in one
        ]
        if told:
            said.append(f"{what} {', '.join(told)}")
    outer = [one["outer_bytes"] for one in held.values() if "outer_bytes" in one]
    plan = [one["outer_planned_bytes"] for one in held.values() if "outer_planned_bytes" in one]
    if outer and plan:
        said.append(f"outer state {format_bytes(max(outer))}, planned {format_bytes(max(plan))}")
    return f"first ranks held at most: {'; '.join(said)}" if said else ""
