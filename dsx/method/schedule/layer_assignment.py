"""Layer assignment: which layers to average in which of the H iterations, from a profile.

Source: DreamDDP (arXiv:2502.11058, Alg. 2, eq. 7-12). Layers are in model order: index 0 is the
input end, and the backward visits L-1 down to 0. An assignment gives each iteration a contiguous
run of layers, the output end first, each layer to exactly one iteration; sets may be empty.

Cost of an iteration (eq. 7): every backward runs over all L layers; a layer's transfer starts
after that layer's backward and after the transfer before it; time counts from the start of the
backward to the later of the two ends. The total of H iterations (eq. 8) is H backwards, which no
assignment changes, plus the exposed seconds: transfer that outlasts its iteration's backward.

Deviations: the forward pass is left out, because it adds the same to every assignment. We solve
eq. 9-10 by an exact dynamic program, which relies on none of the paper's three properties; the
paper's depth-first search is the tests' second implementation, and reaches the same total.
Filling (eq. 12) has the paper's one condition, that no iteration gets longer; the authors' code
also stops at the first layer that does not fit, and fills no bubble behind the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, isfinite
from typing import NamedTuple

Table = tuple[tuple[int, ...], ...]
"""For each of the H iterations, its layers in backward order (descending index)."""

_ROUNDING = 1e-12  # of an iteration's time: what reordered float sums may differ by


def layer_table(
    backward_seconds: Sequence[float], transfer_seconds: Sequence[float], interval: int
) -> Table:
    """Return what to send in each of the `interval` iterations: the assignment, bubbles filled."""
    assignment = assign_layers(backward_seconds, transfer_seconds, interval)
    return fill_bubbles(backward_seconds, transfer_seconds, assignment)


def assign_layers(
    backward_seconds: Sequence[float], transfer_seconds: Sequence[float], interval: int
) -> Table:
    """Return an assignment with the least total time; exact, O(H L^2) at worst.

    Among equally good assignments, as the float sums compare: the one whose first iteration takes
    the most layers, then its second, and so on. Empty sets therefore come last.
    """
    profile = _profile(backward_seconds, transfer_seconds)
    _require_interval(interval)
    num_layers = len(profile.transfer)
    exposed = [_exposed_by_stop(profile, start) for start in range(num_layers + 1)]
    best = [row[-1] for row in exposed]  # one iteration left: it takes all that is left
    stops_by_iteration = [[num_layers] * (num_layers + 1)]
    runs_left = min(interval, num_layers) - 1  # more than L runs would not all be non-empty
    for done in range(runs_left):
        least, stops = [inf] * (num_layers + 1), [num_layers] * (num_layers + 1)
        for start, row in enumerate(exposed):
            for stop, seconds in enumerate(row, start):
                if seconds > least[start]:
                    break  # a longer run exposes no less
                if seconds + best[stop] <= least[start]:
                    least[start], stops[start] = seconds + best[stop], stop
        if least == best:  # no further iteration helps: all that are left are cut like this one
            stops_by_iteration += [stops] * (runs_left - done)
            break
        best = least
        stops_by_iteration.append(stops)
    runs: list[range] = []
    for stops in reversed(stops_by_iteration):
        start = runs[-1].stop if runs else 0
        runs.append(range(start, stops[start]))
    return _layers_of_runs(runs, num_layers, interval)


def equal_numbers(num_layers: int, interval: int) -> Table:
    """Return runs of equally many layers, the output end first (PLSGD-ENP, Example 1).

    Numbers differ by one at most; with fewer layers than iterations some send none.
    """
    _require_interval(interval)
    ends = [num_layers - num_layers * i // interval for i in range(interval + 1)]
    return tuple(
        tuple(reversed(range(low, high))) for high, low in zip(ends, ends[1:], strict=False)
    )


def fill_bubbles(
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    assignment: Sequence[Iterable[int]],
) -> Table:
    """Return the assignment with further layers in the idle time of the channel (eq. 12).

    Each iteration is offered the layers it lacks once, the output end first, and takes every one
    that does not make it longer (beyond float rounding) than the assignment did.
    """
    profile = _profile(backward_seconds, transfer_seconds)
    filled: dict[tuple[int, ...], tuple[int, ...]] = {}  # iterations often send the same, or none
    table: list[tuple[int, ...]] = []
    for layers in assignment:
        positions = tuple(_positions(profile, layers))
        if positions not in filled:
            filled[positions] = _filled(profile, positions)
        table.append(filled[positions])
    return tuple(table)


class _Profile(NamedTuple):
    """Per position in backward order: position 0 is layer L-1."""

    ready: list[float]  # end of the layer's backward; the last entry ends the whole backward
    transfer: list[float]


def _profile(backward_seconds: Sequence[float], transfer_seconds: Sequence[float]) -> _Profile:
    if len(backward_seconds) != len(transfer_seconds) or not backward_seconds:
        raise ValueError(
            f"schedule.backward_seconds has {len(backward_seconds)} entries and "
            f"schedule.transfer_seconds has {len(transfer_seconds)}: both need one per layer, of 1 "
            "layer or more; give both of a profile of the same layers, or leave both out"
        )
    for name, values in (("backward", backward_seconds), ("transfer", transfer_seconds)):
        for layer, seconds in enumerate(values):
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(
                    f"schedule.{name}_seconds[{layer}]={seconds} must be a finite number >= 0; "
                    "give that of another profile, or leave both lists out"
                )
    ready = list(accumulate(reversed(backward_seconds)))
    return _Profile(ready, list(reversed(transfer_seconds)))


def _require_interval(interval: int) -> None:
    if interval < 1:
        raise ValueError(
            f"interval={interval} must be at least 1 iteration; use 1 to send every layer each time"
        )


def _positions(profile: _Profile, layers: Iterable[int]) -> list[int]:
    """Return the layers' positions in the order they are sent."""
    num_layers = len(profile.transfer)
    layers = list(layers)
    if len(set(layers)) != len(layers) or not set(layers) <= set(range(num_layers)):
        raise ValueError(
            f"layers={layers} must be distinct and within 0..{num_layers - 1}; "
            "use a table made from a profile of the same layers"
        )
    return sorted(num_layers - 1 - layer for layer in layers)


def _end(profile: _Profile, position: int, channel: float) -> float:
    """Return when the transfer ends on a channel that is busy until `channel`."""
    return max(channel, profile.ready[position]) + profile.transfer[position]


def _seconds(profile: _Profile, positions: Iterable[int]) -> float:
    channel = 0.0
    for position in positions:
        channel = _end(profile, position, channel)
    return max(profile.ready[-1], channel)


def _exposed_by_stop(profile: _Profile, start: int) -> list[float]:
    """Return the exposed seconds of the runs start..stop-1, for stop = start, ..., L."""
    exposed, channel = [0.0], 0.0
    for position in range(start, len(profile.transfer)):
        channel = _end(profile, position, channel)
        exposed.append(max(0.0, channel - profile.ready[-1]))
    return exposed


def _filled(profile: _Profile, assigned: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of one iteration after filling, in backward order."""
    ready, transfer = profile
    num_layers = len(transfer)
    own = set(assigned)
    deadline = _seconds(profile, assigned) * (1 + _ROUNDING)
    # latest[p]: when the channel must be free before position p, for the assigned layers from p
    # on to meet the deadline. Waiting for their own backward met it already.
    latest = [deadline] * (num_layers + 1)
    left = deadline
    for position in range(num_layers - 1, -1, -1):
        if position in own:
            left -= transfer[position]
        latest[position] = left
    sent: list[int] = []
    channel = 0.0
    for position, (is_ready, seconds) in enumerate(zip(ready, transfer, strict=True)):
        end = (channel if channel > is_ready else is_ready) + seconds  # as in `_end`
        if end <= latest[position + 1] or position in own:
            sent.append(num_layers - 1 - position)
            channel = end
    return tuple(sent)


def _layers_of_runs(runs: Sequence[range], num_layers: int, interval: int) -> Table:
    """Turn runs of positions into layers, with empty sets for the iterations after the last."""
    sets = [tuple(num_layers - 1 - position for position in run) for run in runs]
    return (*sets, *[()] * (interval - len(sets)))
