"""A timeline as a picture: a track per thread, colours by what is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.telemetry.trace.batch import TRAINING, Span, Track
from dsx.telemetry.trace.chrome import thread_name, thread_order

MOST_RANKS = 8
COLORS = {
    "forward": "#4e9a51",
    "backward": "#2b6a99",
    "optimizer": "#8c6bb1",
    "compute": "#4e9a51",
    "launch": "#e6b422",
    "wait": "#d62728",
    "apply": "#f08030",
    "meet": "#d9dde2",
    "copy": "#a0785a",
    "encode": "#17a2b8",
    "network": "#9aa5b1",
    "reduce": "#556b2f",
    "decode": "#d16ba5",
}


@dataclass(frozen=True)
class Timeline:
    """Spans by start, an outer one before those inside, and the time that is drawn of them."""

    spans: Sequence[Span]
    start: int
    end: int

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Clusters and ranks, in order."""
        return sorted({span.rank for span in self.spans})


def nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Yield each span, and those of its thread around it, the innermost last."""
    open_spans: dict[Track, list[Span]] = {}
    for span in spans:
        stack = open_spans.setdefault(span.track, [])
        while stack and stack[-1].end < span.end:
            stack.pop()
        yield span, stack
        stack.append(span)


def draw(timeline: Timeline, path: Path) -> None:
    """Draw the time of the timeline into a picture file, of eight ranks at most."""
    from matplotlib.figure import Figure

    ranks = timeline.ranks[:MOST_RANKS]
    tracks = _places(timeline, ranks)
    figure = Figure(figsize=(11, 1.3 + 0.24 * len(tracks)), dpi=110, layout="constrained")
    axes: Any = figure.subplots()
    used: set[str] = set()
    for (track, category, depth), bars in _bars(timeline, tracks).items():
        used.add(category)
        is_training = track[2] == TRAINING
        height = 0.8 if is_training else 0.62
        axes.broken_barh(
            bars,
            (tracks[track] - height / 2, height),
            facecolors=COLORS[category],
            edgecolor="white",
            linewidth=0 if is_training else 0.5,
            zorder=2 + depth,
        )
    _label(axes, tracks, ranks)
    axes.set_xlim(0, (timeline.end - timeline.start) / 1e6)
    axes.set_xlabel("seconds")
    _mark_steps(axes, timeline)
    handles = [
        axes.barh(0, 0, color=color, label=category)
        for category, color in COLORS.items()
        if category in used
    ]
    style: Any = {"frameon": False, "fontsize": 8, "handlelength": 1.2, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), **style)
    figure.savefig(path)


def _places(timeline: Timeline, ranks: list[tuple[int, int]]) -> dict[Track, float]:
    """Return where each thread is drawn, from the top, with room between ranks."""
    found = {span.track for span in timeline.spans}
    tracks: dict[Track, float] = {}
    place = 0.0
    for rank in ranks:
        for track in sorted((track for track in found if track[:2] == rank), key=thread_order):
            tracks[track] = place
            place += 1
        place += 0.6
    return tracks


def _bars(
    timeline: Timeline, tracks: dict[Track, float]
) -> dict[tuple[Track, str, int], list[tuple[float, float]]]:
    """Return starts and lengths in seconds, by thread, category and how deep they are nested."""
    bars: dict[tuple[Track, str, int], list[tuple[float, float]]] = {}
    for span, around in nested(timeline.spans):
        if span.track in tracks and span.category in COLORS:
            bar = (span.start - timeline.start) / 1e6, (span.end - span.start) / 1e6
            bars.setdefault((span.track, span.category, len(around)), []).append(bar)
    return bars


def _label(axes: Any, tracks: dict[Track, float], ranks: list[tuple[int, int]]) -> None:
    axes.set_yticks(list(tracks.values()), [thread_name(track[2]) for track in tracks], fontsize=8)
    for cluster, rank in ranks:
        own = [place for track, place in tracks.items() if track[:2] == (cluster, rank)]
        axes.text(
            -0.085, (min(own) + max(own)) / 2, f"cluster {cluster}\nrank {rank}",
            transform=axes.get_yaxis_transform(), rotation=90, ha="right", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_ylim(max(tracks.values()) + 0.7, -0.7)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _mark_steps(axes: Any, timeline: Timeline) -> None:
    """Write the steps of the first rank above, where each ends."""
    first = timeline.ranks[0]
    ends = {s.step: s.end for s in timeline.spans if s.rank == first and s.category == "optimizer"}
    at = {step: (end - timeline.start) / 1e6 for step, end in ends.items()}
    every = max(1, len(at) // 25)
    shown = {step: x for step, x in at.items() if step % every == 0}
    above = axes.secondary_xaxis("top")
    above.set_xticks(list(shown.values()), [str(step) for step in shown], fontsize=7)
    above.tick_params(length=2, pad=1)
    above.spines["top"].set_visible(False)
    for x in shown.values():
        axes.axvline(x, color="#dddddd", linewidth=0.6, zorder=0)
