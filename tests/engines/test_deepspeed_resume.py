"""A resumed run equals an uninterrupted one in every bit that it holds: presets x engines x stops.

By default every kind of delay and of engine once, and some stops of one of them; every other
preset and all stops of that one with `pytest -m ci`, and the whole product, resumed in new
processes, with
`pytest -m slow tests/engines/test_deepspeed_resume.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dsx.method.choices import PRESETS
from tests.distributed import run_by_parts, run_distributed
from tests.engines.engines import quiet
from tests.engines.resumes import PLACES, ROWS, differences, go_on, train
from tests.installed import needs

pytestmark = needs("deepspeed")

HALF = 0.5
NEVER_UNDER_WAY = (
    "local_sgd", "slowmo", "diloco", "opendiloco", "dreamddp", "plsgd_enp",
    "diloco, outer Adam", "diloco, stochastic int4",
)  # fmt: skip
ALWAYS_UNDER_WAY = (  # one round late, or two
    "diloco_delayed", "eager", "eager_2", "eager_fp4", "co2", "overlap_local_sgd", "cocktail_sgd",
)  # fmt: skip
WHOLE_PRODUCT = list(PLACES)[:6]
PIPELINES_PER_PROCESS = 4  # rows: DeepSpeed leaves a pipeline's groups, and their threads


class Run(NamedTuple):
    """A row over a place, and its stops."""

    row: str
    place: str
    stops: tuple[float, ...]


def every_stop(row: str, place: str) -> Run:
    """At every step of a period, and after half of each; a pipeline's step has no halves."""
    stops: tuple[float, ...] = ROWS[row].stops
    if PLACES[place].num_stages == 1:
        stops += tuple(stop - HALF for stop in stops)
    return Run(row, place, stops)


def some_stops(row: str, place: str) -> Run:
    """Every third of them."""
    return Run(row, place, every_stop(row, place).stops[::3])


def one_stop(row: str, place: str) -> Run:
    """Another offset for every row."""
    stops = every_stop(row, place).stops
    return Run(row, place, (stops[list(ROWS).index(row) % len(stops)],))


PAIRS = (  # after a pipeline DeepSpeed makes no ordinary engine in the same process
    ("dilocox", "zero1"),
    ("streaming_diloco", "zero3, bf16"),
    ("cocodc", "zero2"),
    ("diloco_delayed", "zero0"),
    ("dreamddp", "zero1, bf16"),
    ("diloco", "pipeline, zero0"),
    ("delayed, low rank", "pipeline, zero1, bf16"),
)
FURTHER_PAIRS = (
    ("eager_2", "zero1"),
    ("cocktail_sgd", "zero2"),
    ("overlap_local_sgd", "zero3"),
    ("local_sgd", "zero2"),
    ("slowmo", "zero3"),
    ("eager", "zero3"),
    ("eager_fp4", "zero3, bf16"),
    ("eager, int4, feedback", "zero2"),
    ("opendiloco", "zero0"),
    ("plsgd_enp", "zero3"),
    ("averaging in fragments, overlapped", "zero2"),
    ("streaming, int4, feedback", "zero3"),
    ("recommended", "zero3, bf16"),
    ("shift by a whole round", "zero1"),
    ("co2", "pipeline, zero1"),
)
COVER = [some_stops(*PAIRS[0]), *(one_stop(*pair) for pair in PAIRS[1:])]
COVER_MORE = [every_stop(*PAIRS[0]), *(one_stop(*pair) for pair in FURTHER_PAIRS)]


def train_one(base: str, run: Run) -> dict[str, Any]:
    """Return what a run held at its stops and end."""
    return train(ROWS[run.row], PLACES[run.place], directory(base, run), run.stops)


def disturbed_by_stops(run: Run, kept: dict[str, Any]) -> list[str]:
    """Return what a run that never stops holds otherwise at the end."""
    row, place = ROWS[run.row], PLACES[run.place]
    return [] if row.is_timed else differences(train(row, place)["end"], kept["end"])


def resume_one(base: str, run: Run, kept: dict[str, Any]) -> list[str]:
    """Go on from every stop of a run; return what differs."""
    found: list[str] = []
    for stop in run.stops:
        row, place = ROWS[run.row], PLACES[run.place]
        loaded, ended = go_on(row, place, directory(base, run), stop, kept)
        found += [f"loaded at {stop}: {name}" for name in loaded]
        found += [f"gone on from {stop}: {name}" for name in ended]
    return found


def directory(base: str, run: Run) -> str:
    return f"{base}/{run.row}/{run.place}"


def num_under_way(run: Run, kept: dict[str, Any]) -> int:
    entries = [entry for stop in run.stops for entry in kept[f"{stop:g}"]["in flight"]]
    return sum("launched" in entry for entry in entries)


def zero_residuals(engine: Any) -> None:
    for channel in engine.dsx.loop.state.channels:
        for error in channel.codec.errors.values():
            error.residual.stored.zero_()


def zero_what_is_in_flight(engine: Any) -> None:
    for transfer in engine.dsx.loop.in_flight:
        transfer.pending.wait().zero_()


SPOILERS = {"codec.residual": zero_residuals, "in flight.mean": zero_what_is_in_flight}


def stop_and_resume(base: str, runs: Sequence[Run]) -> dict[str, Any]:
    """In one process; of `COVER` the first is trained without a stop, its resume spoiled, too."""
    quiet()
    results: dict[str, Any] = {"runs": [], "spoiled": {}}
    for run in runs:
        kept = train_one(base, run)
        entry = {"resumed": resume_one(base, run, kept), "under way": num_under_way(run, kept)}
        results["runs"].append(entry)
        if run != COVER[0]:
            continue
        results["disturbed"] = disturbed_by_stops(run, kept)
        for name, spoil in SPOILERS.items():
            row, place, where = ROWS[run.row], PLACES[run.place], directory(base, run)
            results["spoiled"][name] = go_on(row, place, where, run.stops[0], kept, spoil)
    return results


def stop_and_resume_each(base: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    return stop_and_resume(base, runs)["runs"]


def stop_all(base: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Leave what was held on disk, for the processes that go on."""
    rank = os.environ["RANK"]
    quiet()
    results: list[dict[str, Any]] = []
    everything: list[Any] = []
    for run in runs:
        kept = train_one(base, run)
        everything.append(kept)
        disturbed = disturbed_by_stops(run, kept)
        results.append({"disturbed": disturbed, "under way": num_under_way(run, kept)})
    torch.save(everything, f"{base}/kept_{rank}.pt")
    return results


def resume_all(base: str, runs: Sequence[Run]) -> list[list[str]]:
    everything = torch.load(f"{base}/kept_{os.environ['RANK']}.pt", weights_only=False)
    quiet()
    return [resume_one(base, run, kept) for run, kept in zip(runs, everything, strict=True)]


@pytest.fixture(scope="module")
def covered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = str(tmp_path_factory.mktemp("resume"))
    return run_distributed(stop_and_resume, 4, base, COVER, timeout_seconds=280)


def test_every_preset_and_every_stage_is_among_them() -> None:
    covered = COVER + COVER_MORE
    assert {ROWS[run.row].preset for run in covered} == set(PRESETS)
    assert {run.place for run in covered} >= set(WHOLE_PRODUCT)


@pytest.mark.parametrize("run", COVER, ids=lambda run: f"{run.row} over {run.place}")
def test_resume_is_bit_for_bit(run: Run, covered: list[dict[str, Any]]) -> None:
    check(run, [result["runs"][COVER.index(run)] for result in covered])


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_resume_of_every_preset_and_at_every_stop_is_bit_for_bit(tmp_path: Path) -> None:
    ranks = run_by_parts(stop_and_resume_each, 4, str(tmp_path), of=COVER_MORE, timeout_seconds=280)
    for index, run in enumerate(COVER_MORE):
        check(run, [rank[index] for rank in ranks])


def check(run: Run, of_ranks: Sequence[dict[str, Any]]) -> None:
    assert [result["resumed"] for result in of_ranks] == [[]] * 4, run
    if len(run.stops) > 1 or run.row in ALWAYS_UNDER_WAY:
        assert all(result["under way"] for result in of_ranks), run


def test_a_run_that_is_saved_goes_on_as_if_it_were_not(covered: list[dict[str, Any]]) -> None:
    assert [result["disturbed"] for result in covered] == [[]] * 4


@pytest.mark.parametrize("name", SPOILERS)
def test_what_is_not_restored_is_noticed(name: str, covered: list[dict[str, Any]]) -> None:
    """Otherwise the tests above prove nothing."""
    spoiled = [result["spoiled"][name] for result in covered]
    assert any(loaded for loaded, _ in spoiled)
    for loaded, ended in spoiled:
        assert all(name in what for what in loaded)
        assert any(what.startswith("weight/") for what in ended)


def runs_of(place: str) -> list[Run]:
    make = every_stop if place in WHOLE_PRODUCT else one_stop
    return [make(row, place) for row in ROWS]


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("place", PLACES)
def test_resume_in_new_processes_is_bit_for_bit(place: str, tmp_path: Path) -> None:
    runs, num_ranks = runs_of(place), PLACES[place].num_ranks
    size = len(runs) if PLACES[place].num_stages == 1 else PIPELINES_PER_PROCESS
    for first in range(0, len(runs), size):
        resume_in_new_processes(str(tmp_path), runs[first : first + size], num_ranks)


def resume_in_new_processes(base: str, runs: Sequence[Run], num_ranks: int) -> None:
    first = run_distributed(stop_all, num_ranks, base, runs, timeout_seconds=900)
    second = run_distributed(resume_all, num_ranks, base, runs, timeout_seconds=900)
    for index, run in enumerate(runs):
        assert [rank[index]["disturbed"] for rank in first] == [[]] * num_ranks, run
        assert [rank[index] for rank in second] == [[]] * num_ranks, run
        if run.place in WHOLE_PRODUCT and run.row not in NEVER_UNDER_WAY:
            assert all(rank[index]["under way"] for rank in first), run
