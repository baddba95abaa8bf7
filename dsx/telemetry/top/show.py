"""What `dsx top` draws: a row for each cluster, and the last warnings below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dsx.core.units import format_bytes
from dsx.telemetry.measured_rates import mbits
from dsx.telemetry.top.standing import Standing

_WIDE = 110  # columns of a terminal that all of it fits in
_WIDEST = 150  # beyond which there are these, too
_MORE = ("memory", "round trip")
_NARROW = ("cluster", "state", "step", "loss", "utilization", "Mbit/s sent", "last word")
_LOW_UTILIZATION = 0.9
_GOOD, _BAD = "green", "bold red"

Column = tuple[str, Callable[[Standing], str]]
COLUMNS: tuple[Column, ...] = (
    ("cluster", lambda s: str(s.cluster)),
    ("state", lambda s: plain(s.state)),
    ("step", lambda s: _or_dash(s.step, "{:,}")),
    ("loss", lambda s: _or_dash(s.loss, "{:.4g}")),
    ("steps/s", lambda s: _or_dash(s.steps_per_second, "{:.3g}")),
    ("tokens/s", lambda s: _or_dash(s.tokens_per_second, "{:,.0f}")),
    ("utilization", lambda s: _or_dash(s.utilization, "{:.1%}")),
    ("Mbit/s sent", lambda s: _sent(s.bytes_per_second, s.measured_bytes_per_second)),
    ("hidden", lambda s: _or_dash(s.hidden, "{:.0%}")),
    ("round trip", lambda s: _or_dash(_ms(s.round_trip_seconds), "{:.3g} ms")),
    ("memory", lambda s: "-" if s.process_bytes is None else format_bytes(s.process_bytes)),
    ("left out", lambda s: str(s.left_out)),
    ("saved at", lambda s: _or_dash(s.saved_step, "{:,}")),
    ("last word", lambda s: "-" if s.age_seconds is None else f"{duration(s.age_seconds)} ago"),
)


def screen(
    name: str, standings: Sequence[Standing], events: Sequence[str], width: int, hint: str = ""
) -> RenderableType:
    """Return what is shown of a run, for a terminal so wide; all text in it is plain."""
    table = Table(title=Text(plain(name)), title_justify="left", expand=False)
    columns = [c for c in COLUMNS if width >= _WIDEST or c[0] not in _MORE]
    columns = [c for c in columns if width >= _WIDE or c[0] in _NARROW]
    for title, _ in columns:
        table.add_column(title, justify="left" if title == "state" else "right", overflow="fold")
    for one in standings:
        table.add_row(*(Text(told(one), style=_style(title, one)) for title, told in columns))
    lines = [Text(plain(event), overflow="ellipsis", no_wrap=True) for event in events]
    return Group(table, *lines, *([Text(hint, style="dim")] if hint else []))


def plain(text: str) -> str:
    """Return a text without what a terminal would take for an order: it comes from files."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def duration(seconds: float) -> str:
    """Return a duration in few letters."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _style(title: str, one: Standing) -> str:
    if title == "state":
        return _GOOD if one.state == "training" or one.state.startswith("finished") else _BAD
    if title == "utilization" and one.utilization is not None:
        return "" if one.utilization >= _LOW_UTILIZATION else _BAD
    return _BAD if title == "left out" and one.left_out else ""


def _sent(rate: float | None, measured: float | None) -> str:
    """Return a rate, and behind it what the line gave when it was measured, where it was."""
    told = [mbits(one) for one in (rate, measured) if one is not None]
    return "-" if rate is None else " of ".join(told)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
