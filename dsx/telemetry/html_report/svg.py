"""A chart as SVG that stands in a page: lines with dashes, ticks in words, no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dsx.core.units import format_bytes

_WIDTH, _HEIGHT = 620, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 10, 10, 30
_DASHES = ("", "8 3", "2 3", "8 3 2 3", "14 4", "4 4", "1 4")
_MOST = 1e150  # what is beyond is not drawn: its span would be no number
COLORS = 8  # classes c0 to c7 of the page's style


@dataclass(frozen=True)
class Drawn:
    """A line: `y` [points], None where there is none; `is_bold` for one that is the average."""

    name: str
    y: Sequence[float | None]
    is_bold: bool = False


def line_chart(
    title: str, x: Sequence[float], lines: Sequence[Drawn], unit: str, x_name: str
) -> str:
    """Return a figure with a caption, a legend, and lines over x [points]; empty without any."""
    values = [v for line in lines for v in line.y if v is not None and abs(v) < _MOST]
    if not values or not x:
        return ""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = (max(low - room, 0.0) if low >= 0 else low - room), high + room
    is_one = x[-1] <= x[0]  # place, which has no width
    first, last = x[0], x[0] + max(1.0, abs(x[0])) if is_one else x[-1]

    def across(value: float) -> float:
        return _LEFT + (value - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_tick(_LEFT, up(v), _written(v, unit), False) for v in _ticks(low, high, 5)]
    parts += [
        _tick(across(v), _HEIGHT - _BOTTOM, f"{v:,.6g}", True)
        for v in ([first] if is_one else _ticks(first, last, 6))
    ]
    for index, line in enumerate(lines):
        parts.append(_path(line, index, x, across, up))
    legend = "".join(_legend(line, index, unit) for index, line in enumerate(lines))
    words = f"{title} by {x_name}"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><ul class='legend'>{legend}</ul>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(words, True)}'>"
        f"{''.join(parts)}<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 2}' class='name'>"
        f"{escape(x_name)}</text></svg></figure>"
    )


def _path(
    line: Drawn,
    index: int,
    x: Sequence[float],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> str:
    points = [(across(at), up(v)) for at, v in zip(x, line.y, strict=True)
              if v is not None and abs(v) < _MOST]  # fmt: skip
    text = " ".join(f"{at:.1f},{height:.1f}" for at, height in points)
    return f"<polyline points='{text}' {_look(line, index)}/>"


def _look(line: Drawn, index: int) -> str:
    kind = "bold" if line.is_bold else f"c{index % COLORS}"
    dash = "" if line.is_bold else _DASHES[index % len(_DASHES)]
    return f"class='line {kind}'" + (f" stroke-dasharray='{dash}'" if dash else "")


def _legend(line: Drawn, index: int, unit: str) -> str:
    last = escape(_written(next((v for v in reversed(line.y) if v is not None), math.nan), unit))
    return (
        f"<li><svg width='28' height='10' aria-hidden='true'><line x1='0' x2='28' y1='5' y2='5' "
        f"{_look(line, index)}/></svg>{escape(line.name)} <b>{last}</b></li>"
    )


def _tick(x: float, y: float, text: str, is_below: bool) -> str:
    if is_below:
        return f"<text x='{x:.1f}' y='{y + 14:.1f}' text-anchor='middle'>{escape(text)}</text>"
    grid = f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
    return f"{grid}<text x='{x - 6}' y='{y + 4:.1f}' text-anchor='end'>{escape(text)}</text>"


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers from low to high, about as many."""
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _written(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "-"
    if unit in ("bytes", "bytes/s"):
        return format_bytes(value) + ("/s" if unit == "bytes/s" else "")
    if unit == "percent":
        return f"{100 * value:.4g} %"
    return f"{value:,.4g}" + (" s" if unit == "seconds" else "")


def names_of(data: dict[str, Any]) -> list[Drawn]:
    """Return the lines of what `chart_data` has found."""
    found: list[Drawn] = []
    for line in data["lines"]:
        cluster = f"cluster {line['cluster']}" if "cluster" in line else ""
        name = ", ".join(filter(None, [cluster, line["name"]]))
        found.append(Drawn(name, line["y"], is_bold=line["name"] == "average"))
    return found
