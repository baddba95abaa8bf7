"""Which charts there are, and their points: a line for each cluster, cut into buckets.

A bucket is a stretch of the axis. For each there is one number, and where a line has them the least
and the greatest value in it, so that a peak between two points is seen. A loss that is not a number
is a gap, which a stretch without records is not. All lines of a chart have the same buckets: what
clusters have at one place lies above each other, also where their steps took differently long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dsx.telemetry.watch.cluster import WatchedCluster
from dsx.telemetry.watch.table import Table, in_buckets

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
MOST_POINTS = 2000
_MOST_LINES = 16  # a cluster more has none of its own; the average has all of them
_Array = Any  # of numpy, float64
_Columns = dict[str, _Array]


@dataclass(frozen=True)
class Line:
    """A number of each bucket: from the table `of` a cluster by `value`.

    `needs`: columns without which there is no line. `has_range`: whether columns `low` and `high`
    say how far it went. `is_shared`: the same in all clusters, so that one line is enough.
    """

    name: str
    of: Literal["steps", "losses", "validation", "syncs", "machine"]
    needs: tuple[str, ...]
    value: Callable[[_Columns, _Array], _Array]
    has_range: bool = False
    is_shared: bool = False
    has_average: bool = False
    is_dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Some lines above one axis; `unit` is how the page writes a value."""

    key: str
    title: str
    unit: Literal["number", "percent", "bytes", "bytes/s", "seconds", "steps"]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class View:
    """What is looked at: `first` to `end` of an axis, None for its own; of it the `last` share."""

    axis: Axis = "step"
    first: float | None = None
    end: float | None = None
    last: float | None = None
    points: int = 600


def _mean(name: str) -> Callable[[_Columns, _Array], _Array]:
    return lambda rows, starts: in_buckets("mean", rows[name], starts)


def _known(name: str) -> Callable[[_Columns, _Array], _Array]:
    return lambda rows, starts: in_buckets("known", rows[name], starts)


def _last(name: str) -> Callable[[_Columns, _Array], _Array]:
    return lambda rows, starts: in_buckets("last", rows[name], starts)


def _high(name: str) -> Callable[[_Columns, _Array], _Array]:
    return lambda rows, starts: in_buckets("high", rows[name], starts)


def _ratio(above: str, below: str) -> Callable[[_Columns, _Array], _Array]:
    """Divide the sums of two columns."""

    def value(rows: _Columns, starts: _Array) -> _Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = in_buckets("sum", rows[above], starts) / in_buckets("sum", rows[below], starts)
        return np.where(np.isfinite(found), found, np.nan)

    return value


def _rest(above: str, below: str) -> Callable[[_Columns, _Array], _Array]:
    ratio = _ratio(above, below)
    return lambda rows, starts: 1 - ratio(rows, starts)


def _of_sync(name: str, column: str, is_shared: bool = False) -> Line:
    return Line(name, "syncs", (column,), _known(column), is_shared=is_shared)


CHARTS = (
    Chart("loss", "Loss", "number", (
        Line("", "losses", ("value",), _mean("value"), has_range=True, has_average=True),
        Line("validation", "validation", ("value",), _mean("value"), is_dots=True),
    )),
    Chart("utilization", "Utilization", "percent", (
        Line("", "steps", ("blocked", "seconds"), _rest("blocked", "seconds")),
    )),
    Chart("speed", "Tokens per second", "number", (
        Line("", "steps", ("trained", "seconds"), _ratio("trained", "seconds")),
    )),
    Chart("step_seconds", "Seconds of a step", "seconds", (
        Line("", "steps", ("seconds",), _ratio("seconds", "count")),
    )),
    Chart("line", "What the line carries", "bytes/s", (
        Line("", "syncs", ("bytes_sent", "transfer_seconds"),
             _ratio("bytes_sent", "transfer_seconds")),
    )),
    Chart("transfer", "Seconds of a transfer", "seconds", (
        Line("on its way", "syncs", ("transfer_seconds",), _ratio("transfer_seconds", "count")),
        Line("waited for", "syncs", ("wait_seconds",), _ratio("wait_seconds", "count")),
    )),
    Chart("sent", "Sent by a cluster", "bytes", (
        Line("", "steps", ("sent",), _last("sent")),
    )),
    Chart("round_trip", "Round trip to the other clusters", "seconds", (
        Line("", "machine", ("round_trip_seconds",), _known("round_trip_seconds")),
    )),
    Chart("memory", "Memory of each cluster's first rank", "bytes", (
        Line("process", "machine", ("process_bytes",), _high("process_bytes")),
        Line("device", "machine", ("device_bytes",), _high("device_bytes")),
        Line("outer state", "machine", ("outer_bytes",), _high("outer_bytes")),
    )),
    Chart("norms", "Size of what is exchanged", "number", (
        _of_sync("pseudo-gradient", "pseudo_gradient_norm"),
        _of_sync("mean", "mean_norm", is_shared=True),
    )),
    Chart("agreement", "How alike rounds and clusters are", "number", (
        _of_sync("autocorrelation", "autocorrelation", is_shared=True),
        _of_sync("cosine between clusters", "cluster_cosine", is_shared=True),
        _of_sync("norm ratio", "norm_ratio", is_shared=True),
    )),
    Chart("gain", "Effective gain", "number", (
        _of_sync("effective gain", "effective_gain", is_shared=True),
    )),
    Chart("age", "Interval and age of a mean", "steps", (
        _of_sync("interval H", "interval", is_shared=True),
        _of_sync("age when applied", "delay", is_shared=True),
    )),
    Chart("compression", "What compression leaves out", "number", (
        _of_sync("rank", "rank", is_shared=True),
        _of_sync("captured energy", "captured_energy", is_shared=True),
        _of_sync("correction", "correction_ratio"),
    )),
    Chart("own_progress", "Own progress that is not sent yet", "number", (
        _of_sync("unsent", "unsent_norm"),
        _of_sync("look-ahead", "look_ahead_norm"),
    )),
)  # fmt: skip
BY_KEY = {chart.key: chart for chart in CHARTS}


def has_chart(chart: Chart, clusters: Sequence[WatchedCluster]) -> bool:
    """Whether there is anything to draw."""
    return any(_is_known(line, cluster) for line in chart.lines for cluster in clusters)


def axes_of(clusters: Sequence[WatchedCluster]) -> list[Axis]:
    """Return the axes that there are: tokens only where all clusters count them."""
    counts = [c.counts_tokens and c.steps.is_known("tokens") for c in clusters]
    return [axis for axis in AXES if axis != "tokens" or (counts and all(counts))]


def chart_data(
    chart: Chart,
    clusters: Sequence[WatchedCluster],
    view: View,
    against: Sequence[WatchedCluster] = (),
    levels: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what a chart draws: `x` [buckets], and `lines` with `y`, and `low` and `high`.

    `gaps` are the buckets of a line whose values are no numbers, and those that lie where the
    cluster took no step; others without a value have no record.

    `against` is another run, drawn as its average, and `levels` are what a line may carry, and
    what it was measured to, by name. ValueError for a view that ends before it begins.
    """
    pairs = [
        (line, cluster)
        for line in chart.lines
        for cluster in clusters[: 1 if line.is_shared else _MOST_LINES]
        if _is_known(line, cluster)
    ]
    axis = view.axis
    whole = _span_of([getattr(cluster, line.of) for line, cluster in pairs], axis)
    low = whole[0] if view.first is None else view.first
    high = whole[1] if view.end is None else view.end
    if high < low:
        raise ValueError(f"from={low:g} must not lie behind to={high:g}")
    if view.last is not None:
        low = high - view.last * (high - low)
    edges, x = _buckets(low, high, min(max(view.points, 2), MOST_POINTS), axis)
    lines = [_draw(line, cluster, axis, edges) for line, cluster in pairs]
    for line in chart.lines:
        if line.has_average:
            lines += _averages(line, clusters, against, axis, edges)
    for name, level in (levels or {}).items() if chart.unit == "bytes/s" else ():
        lines.append({"name": name, "y": [level] * len(x)})
    return {
        "chart": chart.key, "axis": axis, "span": [low, high], "whole": [*whole],
        "x": x.tolist(), "lines": lines,
    }  # fmt: skip


def _buckets(low: float, high: float, points: int, axis: Axis) -> tuple[_Array, _Array]:
    """Return edges [buckets + 1], and a place in each bucket; steps are whole."""
    if axis == "step":
        width = max(1, int(np.ceil((high - low + 1) / points)))
        first = int(low) // width * width  # the same places while a run grows
        edges = np.arange(first, high + width + 1, width, dtype=float)
        return edges, edges[:-1] + (width - 1) / 2
    width = max((high - low) / points, 1e-9)
    edges = np.linspace(low, high + width * 1e-6, points + 1)
    return edges, (edges[:-1] + edges[1:]) / 2


def _draw(line: Line, cluster: WatchedCluster, axis: Axis, edges: _Array) -> dict[str, Any]:
    rows, starts = _cut(getattr(cluster, line.of), axis, edges)
    y = line.value(rows, starts)
    is_empty = np.isnan(y)
    is_gap = is_empty & _is_away(cluster, axis, edges)
    if line.has_range:
        is_gap |= is_empty & (np.diff(starts) > 0)
    found: dict[str, Any] = {"name": line.name, "y": _plain(y)}
    found["gaps"] = np.flatnonzero(is_gap).tolist()
    if not line.is_shared:
        found["cluster"] = cluster.cluster
    if line.is_dots:
        found["dots"] = True
    if line.has_range and _has_several(starts):
        found["low"] = _plain(in_buckets("low", rows["low"], starts))
        found["high"] = _plain(in_buckets("high", rows["high"], starts))
    return found


def _is_away(cluster: WatchedCluster, axis: Axis, edges: _Array) -> _Array:
    """Return which buckets [buckets] begin where the others took steps and this cluster none."""
    if not cluster.counts_tokens:
        return np.zeros(len(edges) - 1, bool)
    rows = cluster.steps.read()
    if len(rows["step"]) < 2:
        return np.zeros(len(edges) - 1, bool)
    is_jump = np.diff(rows["step"]) > 2 * cluster.steps.records_per_row
    places = _growing(rows[axis])
    before = np.searchsorted(places, edges[:-1]) - 1  # the last row that lies before a bucket
    is_between = (before >= 0) & (before < len(places) - 1)
    before = np.where(is_between, before, 0)
    return is_between & is_jump[before] & (places[before + 1] >= edges[1:])


def _averages(
    line: Line,
    clusters: Sequence[WatchedCluster],
    against: Sequence[WatchedCluster],
    axis: Axis,
    edges: _Array,
) -> list[dict[str, Any]]:
    """Return the average of all clusters, and that of another run's."""
    found: list[dict[str, Any]] = []
    for name, group in (("average", clusters), ("reference", against)):
        lines: list[_Array] = []
        for cluster in group:
            if _is_known(line, cluster):
                rows, starts = _cut(getattr(cluster, line.of), axis, edges)
                lines.append(line.value(rows, starts))
        if lines and (name == "reference" or len(lines) > 1):
            found.append({"name": name, "y": _plain(np.mean(lines, axis=0))})
    return found


def _cut(table: Table, axis: Axis, edges: _Array) -> tuple[_Columns, _Array]:
    """Return a table's columns, and where each bucket starts."""
    rows = table.read()
    return rows, np.searchsorted(_growing(rows[axis]), edges)


def _growing(places: _Array) -> _Array:
    """Return places that never go back; one that is not known yet lies before all."""
    return np.maximum.accumulate(np.where(np.isnan(places), -np.inf, places))


def _span_of(tables: Sequence[Table], axis: Axis) -> tuple[float, float]:
    columns = [table.read()[axis] for table in tables]
    columns = [column[~np.isnan(column)] for column in columns]
    columns = [column for column in columns if len(column)]
    if not columns:
        return 0.0, 1.0
    low = min(float(column[0]) for column in columns)
    return low, max(float(column.max()) for column in columns)


def _is_known(line: Line, cluster: WatchedCluster) -> bool:
    table: Table = getattr(cluster, line.of)
    return all(table.is_known(name) for name in line.needs)


def _has_several(starts: _Array) -> bool:
    return bool((np.diff(starts) > 1).any())


def _plain(values: _Array) -> list[float | None]:
    """Return numbers of six digits, None for what is none."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
