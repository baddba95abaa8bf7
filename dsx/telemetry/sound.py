"""Which records are as dsx writes them: a script can log a kind, or a field, of the same name.

What is not is left out, so that no such record takes down what shows the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

from dsx.telemetry.run_folder import Record

_MOST = 1 << 53  # whole numbers that a float has, too
_MOST_SECONDS = 253_402_300_000.0  # since 1970: what a calendar has
_MOST_CLUSTERS = 10_000
_Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float has; it may be none (nan), or without end."""
    kind = type(value)
    return kind is float or (kind is int and -_MOST <= value <= _MOST)


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) < 1e300


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < _MOST_SECONDS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_clusters(value: Any) -> bool:
    return _is_count(value) and 0 < value <= _MOST_CLUSTERS


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, cast("list[Any]", value)))


def _is_pairs(value: Any) -> bool:
    """Whether it is as `arrived` of a step: pairs of a fragment and the step of its launch."""
    return _is_list(value) and all(_is_counts(pair) and len(pair) == 2 for pair in value)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, cast("dict[str, Any]", value).values()))


def _is_links(value: Any) -> bool:
    return _is_list(value) and all(map(_is_link, value))


def _is_link(value: Any) -> bool:
    numbers = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return _is_count(numbers.get("to")) and all(map(_is_finite, numbers.values()))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NEEDED: dict[str, dict[str, _Check]] = {
    "step": {"step": _is_count},
    "sync": {"applied_step": _is_count, "launched_step": _is_count, "fragment": _is_count},
    "members": {"step": _is_count, "members": _is_counts},
    "rollback": {"step": _is_count, "from_step": _is_count, "why": _is_text},
    "validation": {"step": _is_finite},
    "launch": {"step": _is_count, "fragment": _is_count},
    "machine": {"step": _is_count},
    "healed": {"step": _is_count},
    "not_saved": {"step": _is_count, "why": _is_text},
    "not_copied": {"step": _is_count, "why": _is_text},
    "copied": {"step": _is_count, "url": _is_text, "bytes": _is_finite, "seconds": _is_finite},
}
_LISTS = ("refused_by", "differed_in", "uncommitted_by", "idle_in", "guard_alarms", "guard_rungs")
_IF_THERE: dict[str, dict[str, _Check]] = {
    "start": {"num_clusters": _is_clusters, "axes": _is_object},
    "sync": {"stage": _is_count, "numel": _is_count, **dict.fromkeys(_LISTS, _is_list)},
    "planned": {"planned_steps": _is_count},
    "launch": {"stage": _is_count},
}
_FIELDS: dict[str, dict[str, _Check]] = {  # left out of a record where they are something else
    "start": {"outer_memory": _is_sizes, "coding_cores": _is_count},
    "step": {
        "loss": is_number, "arrived": _is_pairs, "applied": _is_pairs,
        **dict.fromkeys(
            ("seconds", "blocked_seconds", "tokens", "bytes_sent", "skipped_steps"), _is_finite
        ),
    },
    "sync": {
        **dict.fromkeys(
            ("wait_seconds", "transfer_seconds", "coding_seconds", "turn_seconds", "commit_seconds",
             "bytes_sent", "round", "interval"), _is_finite,
        ),
        **dict.fromkeys(
            ("autocorrelation", "cluster_cosine", "norm_ratio", "effective_gain"), is_number
        ),
    },
    "finish": {"bytes_sent": _is_finite, "skipped_steps": _is_finite},
    "machine": {
        "links": _is_links,
        **dict.fromkeys(
            ("process_bytes", "outer_bytes", "outer_planned_bytes", "device_bytes",
             "device_peak_bytes", "device_total_bytes", "measured_bytes_per_second"), _is_finite,
        ),
    },
    "healed": dict.fromkeys(
        ("seconds", "copied_bytes", "held_bytes", "results_bytes"), _is_finite
    ),
}  # fmt: skip


def sound_record(record: Any) -> Record | None:
    """Return a record without what is no number where one belongs; None for one of something else.

    A kind that dsx does not write is passed on as it is.
    """
    if not isinstance(record, dict):
        return None
    found = cast("dict[str, Any]", record)
    kind = found.get("kind")
    if not isinstance(kind, str) or not _is_time(found.get("time")):
        return None
    for name, check in _NEEDED.get(kind, {}).items():
        if not check(found.get(name)):
            return None
    for name, check in _IF_THERE.get(kind, {}).items():
        value = found.get(name)
        if value is not None and not check(value):
            return None
    fields = _FIELDS.get(kind, {})
    odd = [name for name, check in fields.items() if name in found and not check(found[name])]
    return {name: found[name] for name in found if name not in odd} if odd else found


def sound_summary(summary: Record) -> Record:
    """Return what a script has summed up, its losses on other data only where they are numbers."""
    found = dict(summary)
    if not is_number(found.get("val_loss_average")):
        found.pop("val_loss_average", None)
    own = found.pop("val_loss_clusters", None)
    if isinstance(own, list):
        found["val_loss_clusters"] = [v for v in cast("list[Any]", own) if is_number(v)]
    return found


def seconds_of(when: str) -> float:
    """Return the seconds since 1970 of a time in run.json."""
    return datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()


def sound_about(about: Record) -> Record | None:
    """Return what a run.json says, as far as it is as dsx writes it; None where no start is."""
    starts = [start for start in map(_sound_start, about["starts"]) if start is not None]
    if not starts:
        return None
    found = {**about, "starts": starts}
    told = about.get("checkpoints")
    if told is not None:
        entries = cast("list[Any]", told) if isinstance(told, list) else []
        found["checkpoints"] = [entry for entry in entries if _is_checkpoint(entry)]
    return found


def _is_checkpoint(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _is_count(cast("Record", entry).get("step"))
        and all(_is_text(cast("Record", entry).get(name)) for name in ("tag", "path"))
        and _is_moment(cast("Record", entry).get("time"))
        and _is_text(cast("Record", entry).get("copied_to", ""))
    )


def _sound_start(start: Any) -> Record | None:
    if not isinstance(start, dict):
        return None
    told = cast("dict[str, Any]", start)
    begun = told.get("time")
    if not isinstance(begun, str) or not _is_moment(begun):
        return None
    checks: dict[str, _Check] = {
        "step": _is_count, "num_clusters": _is_clusters, "session": _is_text,
        "resumed_session": _is_text, "host": _is_text, "config": _is_config,
        "pid": lambda value: type(value) is int and 0 < value < 1 << 31,
        "rolled_back": lambda value: isinstance(value, dict) and "why" in value,
    }  # fmt: skip
    found = {
        name: value
        for name, value in told.items()
        if value is None or name not in checks or checks[name](value)
    }
    if found.get("pid") is None:
        found.pop("host", None)  # whose process it is cannot be looked for
    if found.get("rolled_back") and "step" not in found:
        found.pop("rolled_back")
    if found.get("end"):
        found["end"] = _sound_end(found["end"], begun)
    return found


def _sound_end(end: Any, begun: str) -> Record:
    """Return an end with all that is told of one."""
    told: Mapping[str, Any] = cast("Record", end) if isinstance(end, dict) else {}
    return {
        **told,
        "how": str(told.get("how", "ended")),
        "step": told["step"] if _is_count(told.get("step")) else "?",
        "time": told["time"] if _is_moment(told.get("time")) else begun,
    }


def _is_moment(value: Any) -> bool:
    try:
        return isinstance(value, str) and _is_time(seconds_of(value))
    except (ValueError, OverflowError):
        return False


def _is_config(value: Any) -> bool:
    resolved = value.get("resolved") if isinstance(value, dict) else 0  # type: ignore[misc]
    if not resolved:
        return resolved is None or resolved == {}
    link = resolved.get("link") if isinstance(resolved, dict) else 0  # type: ignore[misc]
    if not link:
        return link is None or link == {}
    rate = link.get("rate_mbit") if isinstance(link, dict) else ""  # type: ignore[misc]
    return rate is None or _is_finite(rate)
