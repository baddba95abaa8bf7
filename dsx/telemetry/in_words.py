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


def said_of_setup(state: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Say which method runs, over what: by what the page shows, and the resolved settings."""
    said: list[str] = []
    ranks = ""
    if "ranks" in state:
        ranks = " of 1 rank" if state["ranks"] == 1 else f" of {state['ranks']} ranks"
    preset = f"Preset {state['preset']!r} with " if "preset" in state else ""
    device = f" on {state['device']}" if "device" in state else ""
    said.append(f"{preset}{state['num_clusters']} clusters{ranks}{device}.")
    told = [_say_axis(name, settings.get(name)) for name in ("schedule", "delay", "compression")]
    if isinstance(outer := settings.get("outer_optimizer"), Mapping):
        numbers: Mapping[str, Any] = outer  # type: ignore[assignment]
        rest = [f"{k}={v:g}" for k in ("lr", "momentum") if isinstance(v := numbers.get(k), float)]
        told.append(f"the outer optimizer is {numbers.get('type')} ({', '.join(rest)})")
    if any(told):
        said.append(sentence("; ".join(filter(None, told))))
    if "line_limit_mbit" in state:
        said.append(f"Each cluster may send {state['line_limit_mbit']:g} Mbit/s (link.rate_mbit).")
    return said


def sentence(text: str) -> str:
    """Return a text that begins and ends as a sentence does."""
    return f"{text[:1].upper()}{text[1:]}."


def _say_axis(name: str, settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return ""
    told: Mapping[str, Any] = settings  # type: ignore[assignment]
    shown = ("interval", "steps", "wire", "mean_wire", "rank", "share")
    rest = [f"{key}={told[key]}" for key in shown if told.get(key) not in (None, 0)]
    return f"{name} is {told.get('type')}" + (f" ({', '.join(rest)})" if rest else "")
