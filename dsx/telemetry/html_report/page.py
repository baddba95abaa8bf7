"""Puts a report together: one file that loads nothing, in which names of a run are text.

One run is told of in sentences, with its charts; several are compared: a table, what differs in
their settings, and their losses in one chart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dsx.core.units import format_bytes
from dsx.telemetry.html_report.numbers import RunNumbers, numbers_of
from dsx.telemetry.html_report.sentences import (
    duration,
    what_cost_time,
    what_happened,
    what_is_missing,
    what_to_change,
    what_was_set,
)
from dsx.telemetry.html_report.svg import Drawn, line_chart, names_of
from dsx.telemetry.run_file import replace_file
from dsx.telemetry.run_folder import find_run, open_summary
from dsx.telemetry.watch.charts import BY_KEY, CHARTS, Axis, View, axes_of, chart_data, has_chart
from dsx.telemetry.watch.meanings import MEANINGS
from dsx.telemetry.watch.run import WatchedRun

_POINTS = 400
_How = Callable[[float], str]  # a number in words
_AXES: dict[Axis, str] = {"step": "inner step", "tokens": "tokens of a cluster", "time": "time"}


def write_html(runs: Sequence[str | Path], out: Path) -> None:
    """Write the report of a run, or of several, to a file.

    FileNotFoundError, ValueError or OSError says what cannot be read or written.
    """
    found = [read_numbers(run) for run in runs]
    text = page_of_run(found[0]) if len(found) == 1 else page_of_several(found)
    replace_file(out, text)


def read_numbers(path: str | Path) -> RunNumbers:
    """Read a run that is there."""
    folder = find_run(path)
    return numbers_of(WatchedRun(folder), open_summary(folder))


def page_of_run(numbers: RunNumbers) -> str:
    """Return the page of one run."""
    parts = [
        f"<h1>{escape(numbers.name)}</h1>",
        _missing(numbers),
        _said("What to change", what_to_change(numbers)),
        _said("What was set", what_was_set(numbers)),
        _said("What happened", what_happened(numbers)),
        _said("What cost time", what_cost_time(numbers)),
        f"<h2>Charts</h2><div class='charts'>{''.join(_charts(numbers))}</div>",
        _events(numbers),
        _settings(numbers.settings),
    ]
    return _page(numbers.name, parts)


def page_of_several(runs: Sequence[RunNumbers]) -> str:
    """Return a page that compares runs."""
    names = _told_apart([numbers.name for numbers in runs])
    title = " and ".join(names)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(_missing(numbers, f"{name}: ") for name, numbers in zip(names, runs, strict=True)),
        _said("What differs", _compared(runs, names)),
        f"<h2>Side by side</h2>{_table(runs, names)}",
        f"<h2>Loss</h2><div class='charts'>{''.join(_losses(runs, names))}</div>",
        f"<h2>Settings that differ</h2>{_differing(runs, names)}",
    ]
    for name, numbers in zip(names, runs, strict=True):
        parts.append(_said(f"{name}: what to change", what_to_change(numbers)))
        parts.append(_said(f"{name}: what cost time", what_cost_time(numbers)))
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    style = resources.files("dsx.telemetry.html_report").joinpath("report.css").read_text()
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)} - dsx report</title><style>{style}</style></head>\n<body>"
        + "\n".join(parts) + "\n</body></html>\n"
    )  # fmt: skip


def _said(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<h2>{escape(title)}</h2><ul class='said'>{items}</ul>"


def _missing(numbers: RunNumbers, whose: str = "") -> str:
    missing = what_is_missing(numbers)
    title = f"{whose}what could not be read" if whose else "What could not be read"
    return _said(title, missing) if missing else ""


def _charts(numbers: RunNumbers) -> list[str]:
    clusters = numbers.run.clusters
    axis: Axis = "tokens" if "tokens" in axes_of(clusters) else "step"
    found: list[str] = []
    for chart in CHARTS:
        if has_chart(chart, clusters):
            by: Axis = axis if chart.key == "loss" else "step"
            data = chart_data(chart, clusters, View(by, points=_POINTS))
            drawn = line_chart(chart.title, data["x"], names_of(data), chart.unit, _AXES[by])
            what = f"<p class='what'>{escape(MEANINGS[chart.key]['means'])}</p></figure>"
            found.append(drawn.replace("</figure>", what))
    return found


def _losses(runs: Sequence[RunNumbers], names: Sequence[str]) -> list[str]:
    """Draw every run's average, by each axis that all of them have; time from the first step."""
    found: list[str] = []
    for axis, x_name in _AXES.items():
        if any(axis not in axes_of(numbers.run.clusters) for numbers in runs):
            continue
        whole = View(axis, points=2)
        spans = [chart_data(BY_KEY["loss"], r.run.clusters, whole)["whole"] for r in runs]
        begins = [span[0] if axis == "time" else 0.0 for span in spans]
        length = max(span[1] - b for span, b in zip(spans, begins, strict=True))
        x: list[float] = []
        lines: list[Drawn] = []
        for name, numbers, begin in zip(names, runs, begins, strict=True):
            view = View(axis, begin, begin + length, points=_POINTS)
            data = chart_data(BY_KEY["loss"], numbers.run.clusters, view)
            own = [line for line in data["lines"] if line["name"] in ("", "average")]
            lines.append(Drawn(name, own[-1]["y"] if own else [None] * len(data["x"])))
            x = [at - begin for at in data["x"]]
        x_name = "seconds since the first step" if axis == "time" else x_name
        found.append(line_chart(f"Average loss by {x_name}", x, lines, "number", x_name))
    return found


def _compared(runs: Sequence[RunNumbers], names: Sequence[str]) -> list[str]:
    """Say which run is first in what."""
    said: list[str] = []

    def best(what: str, values: Sequence[float | None], written: _How, least: bool = True) -> None:
        known = [(value, name) for value, name in zip(values, names, strict=True)
                 if value is not None and value == value]  # fmt: skip
        if len(known) > 1:
            known.sort(reverse=not least)
            told = ", ".join(f"{name} {written(value)}" for value, name in known)
            same = known[0][0] == known[-1][0]
            said.append(
                f"{what}: {told}" + ("; all the same." if same else f"; {known[0][1]} is first.")
            )

    best("Last loss", [r.last_loss for r in runs], lambda v: f"{v:.4g}")
    best("Loss of the average on data not trained on",
         [r.summary.get("val_loss_average") for r in runs], lambda v: f"{v:.4f}")  # fmt: skip
    best("Time of the slowest cluster", [r.slowest.whole for r in runs], duration)
    best("Time waited for transfers", [r.slowest.waited for r in runs], duration)
    best("Sent by a cluster", [r.state["traffic"].get("sent") for r in runs], format_bytes)
    best("Utilization", [r.utilization for r in runs], lambda v: f"{100 * v:.3g} %", least=False)
    return said


def _table(runs: Sequence[RunNumbers], names: Sequence[str]) -> str:
    def written(value: float | None, how: _How) -> str:
        return "-" if value is None else how(value)

    rows: list[tuple[str, list[str]]] = [
        ("clusters", [str(r.state["num_clusters"]) for r in runs]),
        ("inner steps", [f"{r.state['step']:,}" for r in runs]),
        ("tokens", [written(r.state.get("tokens"), lambda v: f"{v:,.0f}") for r in runs]),
        ("last loss", [written(r.last_loss, lambda v: f"{v:.4g}") for r in runs]),
        ("validation of the average",
         [written(r.summary.get("val_loss_average"), lambda v: f"{v:.4f}") for r in runs]),
        ("tokens/s of all clusters",
         [f"{sum(c.tokens_per_second or 0 for c in r.clusters):,.0f}" for r in runs]),
        ("utilization", [written(r.utilization, lambda v: f"{100 * v:.3g} %") for r in runs]),
        ("sent by a cluster",
         [written(r.state["traffic"].get("sent"), format_bytes) for r in runs]),
        ("time", [duration(r.slowest.whole) for r in runs]),
        ("of it training", [duration(r.slowest.trained) for r in runs]),
        ("waiting for transfers", [duration(r.slowest.waited) for r in runs]),
        ("held up otherwise", [duration(r.slowest.held_up) for r in runs]),
        ("between steps", [duration(r.slowest.stood) for r in runs]),
        ("rounds left out", [str(sum(r.left_out.values())) for r in runs]),
        ("alarms", [str(sum(r.alarms.values())) for r in runs]),
    ]  # fmt: skip
    return _table_of(names, rows)


def _table_of(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th scope='row'>{escape(title)}</th>"
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for title, values in rows
    )
    return (f"<div class='scrolls'><table><thead><tr><th></th>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>")  # fmt: skip


def _differing(runs: Sequence[RunNumbers], names: Sequence[str]) -> str:
    flat = [_flat(numbers.settings) for numbers in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [one.get(key, "-") for one in flat]) for key in keys
            if len({one.get(key) for one in flat}) > 1 and key != "metrics.dir"]  # fmt: skip
    return _table_of(names, rows) if rows else "<p>None.</p>"


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{key}.")  # type: ignore[arg-type]
        else:
            found[above + key] = json.dumps(value)
    return found


def _events(numbers: RunNumbers) -> str:
    items = [
        (datetime.fromtimestamp(event["time"], timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ"),
         f"cluster {event['cluster']}: {event['text']}")
        for event in reversed(numbers.state["events"])
    ]  # fmt: skip
    return _said("Events", [f"{when} {text}" for when, text in items])


def _settings(settings: Mapping[str, Any]) -> str:
    text = escape(json.dumps(settings, indent=1))
    return (
        f"<h2>Settings</h2><details><summary>all, as resolved</summary><pre>{text}</pre></details>"
    )


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names that differ: of equal ones each has its place behind it."""
    return [
        name if names.count(name) == 1 else f"{name} ({place})"
        for place, name in enumerate(names, start=1)
    ]
