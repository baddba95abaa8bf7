"""Trains combinations in all ways, and holds what they come to side by side."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsx.bench.chaos.forking import NoProgress
from dsx.bench.e2e.run import RunFailed
from dsx.bench.engines.combinations import Combination, EngineName
from dsx.bench.engines.job import CLUSTERS, Job, Seen, Way
from dsx.bench.engines.runs import Runs, meeting_place

METHODS: tuple[Way, ...] = ("recommended", "diloco")
_FALL = 0.9  # of the first loss, by the end
_WORST = 1.2  # times the engine's own loss: what an average, of twice as many samples, may have


@dataclass
class Row:
    """A combination: losses of held-out tokens, nats, and what is wrong with it.

    `plain` is of the engine alone, `one` of dsx with one cluster; `averages` are by method.
    """

    name: str
    engine: EngineName
    layout: str
    ranks: int
    plain: float = math.nan
    one: float = math.nan
    is_same: bool = False
    averages: dict[str, float] = field(default_factory=dict[str, float])
    are_equal: bool = False
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list[str])


def measure(
    asked: Sequence[Combination],
    data: Path,
    steps: int,
    deadline_seconds: float,
    folder: Path,
    say: Callable[[str], None],
) -> Generator[Row, None, None]:
    """Yield a row for each, and tell of it; logs of ranks go to the folder."""
    with contextlib.ExitStack() as stack:
        runs: dict[str, Runs] = {}
        for number, given in enumerate(asked, start=1):
            if given.engine not in runs:
                for other in runs.values():
                    other.close()  # what it has imported is of no use any more
                runs[given.engine] = Runs(folder / given.engine)
                stack.callback(runs[given.engine].close)
            started = time.monotonic()
            row = Row(given.name, given.engine, given.layout, given.ranks)
            if importlib.util.find_spec(given.engine) is None:
                name = given.engine
                row.wrong.append(f"no module {name}; pip install 'dsx-train[{name}]'")
            else:
                _train(row, runs[given.engine], data, steps, deadline_seconds)
            row.seconds = time.monotonic() - started
            say(f"{number}/{len(asked)}  {_told(row)}")
            yield row


def _train(row: Row, runs: Runs, data: Path, steps: int, deadline_seconds: float) -> None:
    """Train in all ways, and fill in the row."""
    seen: dict[Way, list[list[Seen]]] = {}
    for way in CLUSTERS:
        job = Job(row.name, way, steps, str(data.absolute()), meeting_place(), deadline_seconds)
        try:
            seen[way] = runs.train(job)
        except (RunFailed, NoProgress) as failure:
            row.wrong.append(f"{way}: {failure}")
            return
    judge(row, seen)


def judge(row: Row, seen: dict[Way, list[list[Seen]]]) -> None:
    """Fill in a row from what the ranks of all its runs have seen, and say what is wrong."""
    row.plain, row.one = validation(seen["plain"]), validation(seen["one"])
    row.is_same = seen["plain"] == seen["one"]
    if not row.is_same:
        row.wrong.append(f"one cluster is not the engine alone: {_apart(seen)}")
    row.averages = {way: loss for way in METHODS if math.isfinite(loss := validation(seen[way]))}
    apart = [way for way in METHODS if _average(seen[way][0]) != _average(seen[way][1])]
    row.are_equal = not apart
    row.wrong += [f"{way}: averages of the clusters differ" for way in apart]
    row.wrong += [f"{way}: no one loss" for way in METHODS if way not in row.averages]
    first = next(rank.losses[0] for rank in seen["plain"][0] if rank.losses)
    for what, loss in {"plain": row.plain, **row.averages}.items():
        if not loss < _FALL * first:
            row.wrong.append(f"{what}: loss {first:.3f} to {loss:.3f}, not below {_FALL} of it")
    for way, loss in row.averages.items():
        if not loss < _WORST * row.plain:
            row.wrong.append(f"{way}: {loss:.4f}, more than {_WORST} times {row.plain:.4f}")


def validation(clusters: Sequence[Sequence[Seen]]) -> float:
    """Return the loss that the ranks which have one have told, nan if they differ."""
    told = {rank.validation for ranks in clusters for rank in ranks} - {None}
    (loss,) = told if len(told) == 1 else (math.nan,)
    return math.nan if loss is None else loss


def _average(ranks: Sequence[Seen]) -> list[str]:
    return [rank.average for rank in ranks]


def _apart(seen: dict[Way, list[list[Seen]]]) -> str:
    """Say where one cluster has left the engine alone."""
    for rank, (own, other) in enumerate(zip(seen["plain"][0], seen["one"][0], strict=True)):
        for step, (left, right) in enumerate(zip(own.losses, other.losses, strict=True), start=1):
            if left != right:
                return f"rank {rank}, step {step}: loss {left} and {right}"
        if own != other:
            return f"rank {rank}: weights {own.weights} and {other.weights}, equal losses"
    return "nowhere"


def _told(row: Row) -> str:
    what = f"{row.name}: {row.seconds:.0f} s, "
    if row.wrong:
        return what + "; ".join(row.wrong)
    methods = ", ".join(f"{way} {loss:.4f}" for way, loss in row.averages.items())
    return f"{what}plain {row.plain:.4f}, one cluster the same bits, {methods}"
