"""Tables of layers by DreamDDP's own search (arXiv:2502.11058, Alg. 2), and by trying all.

`schedule/layer_assignment.py` finds an optimum otherwise, and shares nothing with this file: each
is the other's check. Layers are in model order, and the backward visits the last one first; a table
has a run of layers per iteration. What a table costs is what its transfers outlast the backwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import accumulate, combinations_with_replacement

from dsx.method.schedule.layer_assignment import Table


def iteration_seconds(
    backward: Sequence[float], transfer: Sequence[float], layers: Collection[int]
) -> float:
    """Return how long an iteration takes that sends `layers`, from its backward on (eq. 7)."""
    now = channel = 0.0
    for layer in reversed(range(len(backward))):
        now += backward[layer]
        if layer in layers:
            channel = max(channel, now) + transfer[layer]
    return max(now, channel)


def exposed_seconds(
    backward: Sequence[float], transfer: Sequence[float], table: Sequence[Collection[int]]
) -> float:
    """Return what the iterations of a table take beyond their backwards."""
    compute = sum(backward)
    return sum(iteration_seconds(backward, transfer, layers) - compute for layers in table)


def assign_by_search(backward: Sequence[float], transfer: Sequence[float], interval: int) -> Table:
    """Return a table with the least exposed time, by the search that the paper's properties prune.

    It recurses once or twice per iteration that sends anything.
    """
    ready = [*accumulate(reversed(backward))][::-1]  # by layer: when its backward is over
    compute = ready[0]

    def take_hidden(first: int) -> tuple[int, float, float]:
        """Return the first layer that outlasts the backward, when it begins, and by how much."""
        channel = 0.0
        for layer in range(first, -1, -1):
            begins = max(channel, ready[layer])
            channel = begins + transfer[layer]
            if channel > compute:
                return layer, begins, channel - compute
        return -1, channel, 0.0

    @cache
    def search(first: int, iterations: int) -> tuple[float, tuple[int, ...]]:
        """Return the exposed time of layers `first` to 0, and the last layer of each run."""
        if first < 0:
            return 0.0, ()
        if iterations == 1:
            return exposed_seconds(backward, transfer, [range(first + 1)]), (0,)
        layer, begins, outlasts = take_hidden(first)  # Property 1: take all that is hidden
        if layer < 0:
            return 0.0, (0,)
        found: list[tuple[float, tuple[int, ...]]] = []
        if layer == first or begins < compute:  # Property 2: the next one is sent on
            seconds, rest = search(layer - 1, iterations - 1)
            found.append((outlasts + seconds, (layer, *rest)))
        if layer < first:  # Property 3: each iteration takes one layer at least
            seconds, rest = search(layer, iterations - 1)
            found.append((seconds, (layer + 1, *rest)))
        return min(found)

    last = len(backward) - 1
    return _table(last, search(last, interval)[1], interval)


def assign_by_trying(backward: Sequence[float], transfer: Sequence[float], interval: int) -> Table:
    """Return the table of least exposed time among all that cut the layers into runs."""
    count, compute = len(backward), sum(backward)
    seconds = [
        [
            iteration_seconds(backward, transfer, range(low, high)) - compute
            for low in range(high + 1)
        ]
        for high in range(count + 1)
    ]
    edges = combinations_with_replacement(range(count, -1, -1), interval - 1)
    best = min(
        ((count, *cuts, 0) for cuts in edges),
        key=lambda cuts: sum(seconds[high][low] for high, low in zip(cuts, cuts[1:], strict=False)),
    )
    return tuple(
        tuple(reversed(range(low, high))) for high, low in zip(best, best[1:], strict=False)
    )


def _table(last: int, lasts: Sequence[int], interval: int) -> Table:
    """Turn the last layer of each run into runs, with empty ones for the iterations behind them."""
    firsts = (last, *(layer - 1 for layer in lasts))
    runs = [tuple(range(high, low - 1, -1)) for high, low in zip(firsts, lasts, strict=False)]
    return (*runs, *[()] * (interval - len(runs)))
