"""What a table of layers takes, and DreamDDP's own pruned search for one: the solver's check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from dsx.method.schedule.layer_assignment import (
    Table,
    _end,
    _exposed_by_stop,
    _layers_of_runs,
    _positions,
    _profile,
    _require_interval,
    _seconds,
)


def iteration_seconds(
    backward_seconds: Sequence[float], transfer_seconds: Sequence[float], layers: Iterable[int]
) -> float:
    """Return the time of one iteration that sends `layers`, from the start of its backward."""
    profile = _profile(backward_seconds, transfer_seconds)
    return _seconds(profile, _positions(profile, layers))


def total_seconds(
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    table: Sequence[Iterable[int]],
) -> float:
    """Return the time of all iterations of `table`, each from the start of its backward."""
    profile = _profile(backward_seconds, transfer_seconds)
    return sum(_seconds(profile, _positions(profile, layers)) for layers in table)


def assign_layers_by_search(
    backward_seconds: Sequence[float], transfer_seconds: Sequence[float], interval: int
) -> Table:
    """Return an assignment with the least total time, found by the paper's pruned search.

    The readable counterpart of `assign_layers` for models of few layers: it recurses once per
    non-empty iteration. The totals agree up to rounding; of several optima it may pick another.
    """
    profile = _profile(backward_seconds, transfer_seconds)
    _require_interval(interval)
    ready, transfer = profile
    num_layers = len(transfer)

    @cache
    def search(start: int, num_iterations: int) -> tuple[float, tuple[int, ...]]:
        if start == num_layers:
            return 0.0, ()
        if num_iterations == 1:
            return _exposed_by_stop(profile, start)[-1], (num_layers,)
        stop, channel = start, 0.0  # the run is start..stop-1; the channel is busy until `channel`
        while stop < num_layers and _end(profile, stop, channel) <= ready[-1]:
            channel = _end(profile, stop, channel)  # Property 1, optimal hiding: take it here
            stop += 1
        found: list[tuple[float, tuple[int, ...]]] = []
        is_partly_hidden = stop < num_layers and max(channel, ready[stop]) < ready[-1]
        if is_partly_hidden or stop == start:
            # Take one exposed layer, the last of this run: Property 2, delayed CO, sends the next
            # layer on to the next iteration, as nothing of it would be hidden in this one.
            seconds, stops = search(stop + 1, num_iterations - 1)
            found.append((_end(profile, stop, channel) - ready[-1] + seconds, (stop + 1, *stops)))
        if stop > start:  # Property 3, at least one: an empty set cannot send its layer on
            seconds, stops = search(stop, num_iterations - 1)
            found.append((seconds, (stop, *stops)))
        return min(found, key=lambda option: option[0])

    stops = search(0, interval)[1]
    starts = (0, *stops[:-1])
    runs = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
    return _layers_of_runs(runs, num_layers, interval)
