"""Saves in the midst of exchanges that run on threads of their own, over gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.snapshot import Snapshot
from dsx.engines import simulated
from dsx.outer.transfer import NotSent, Transfer
from tests.checkpoint.gloo_in_one_process import AT_THE_END, GlooHub, HeldTransport
from tests.checkpoint.half_arrived import Impatient, assert_same, lacking, resume, save_all
from tests.checkpoint.test_half_arrived import METHODS, NUM_STEPS, new_run
from tests.compress.test_over_gloo import loss
from tests.simulated import Simulated

MADE: list[HeldTransport] = []


@pytest.fixture(autouse=True)
def _over_gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Hub(GlooHub):
        def transports(self) -> list[HeldTransport]:
            made = super().transports()
            MADE.extend(made)
            return made

    monkeypatch.setattr(simulated, "InProcessHub", Hub)
    yield
    for transport in MADE:
        transport.goes_on.set()
    for transport in MADE:
        transport.close()
    MADE.clear()


def transports(run: Simulated) -> list[HeldTransport]:
    found: Any = [loop.transport for loop in run.loops]
    return found


def end_all(run: Simulated, held: Sequence[HeldTransport] = ()) -> None:
    """Wait for what is under way, but for those that are held."""
    for loop in run.loops:
        for transfer in loop.in_flight:
            if isinstance(transfer, Transfer) and loop.transport not in held:
                transfer.pending.wait()


def end_alike(first: Simulated, second: Simulated) -> None:
    """Train both to the end, and require the same of them."""
    for run in (first, second):
        while run.num_steps < NUM_STEPS:
            run.train_step(loss)
        end_all(run)
    assert_same(second, first)


CASES = [("one step", codec) for codec in ("dense", "int4, fp32", "low rank", "top-k")]
QUICK = [("one step", "dense"), ("one step", "low rank"), ("eager", "int4, fp32")]
CASES += [("streaming", "int4, bf16, decay"), ("eager", "int4, fp32"), ("adaptive rank", "own")]


@pytest.mark.parametrize("where", ["one at the end", "both in the midst"])
@pytest.mark.parametrize(
    ("name", "codec", "num_clusters"),
    [
        *((*case, 2) for case in QUICK),
        *(pytest.param(*case, 2, marks=pytest.mark.ci) for case in CASES if case not in QUICK),
        *(pytest.param(*case, 4, marks=pytest.mark.ci) for case in CASES),
    ],
)
def test_a_save_in_the_midst_of_an_exchange(
    name: str, codec: str, num_clusters: int, where: str, tmp_path: Path
) -> None:
    """One cluster has the mean, or nobody; the run that is saved ends as if nothing had been."""
    first, stop = new_run(name, codec, num_clusters), METHODS[name][2]
    held = transports(first)[-1:] if where == "one at the end" else transports(first)
    for step in range(1, stop + 1):
        if step == stop - 1:
            end_all(first)
            for transport in held:
                transport.hold_after = AT_THE_END if where == "one at the end" else 2
        first.train_step(loss)
    for transport in held:
        assert transport.is_held.wait(20)
    end_all(first, held)
    assert [bool(found) for found in lacking(first)] == [t in held for t in transports(first)]
    save_all(first, tmp_path)
    for transport in held:
        transport.goes_on.set()
    second = new_run(name, codec, num_clusters)
    resume(second, first, tmp_path)
    end_alike(first, second)


def test_a_save_does_not_wait_for_a_peer_that_never_answers(tmp_path: Path) -> None:
    """And says nothing else for it: the mean, were it to come, would be the same."""
    run = new_run("one step", "int4, fp32", 2)
    for _ in range(2):
        run.train_step(loss)
    silent = transports(run)[1]
    silent.hold_after = 1  # it has shaken hands, and sends nothing
    run.train_step(loss)
    assert silent.is_held.wait(20)
    began = time.monotonic()
    save_all(run, tmp_path)
    assert time.monotonic() - began < GlooHub.deadline_seconds / 4
    assert [len(found) for found in lacking(run)] == [1, 1]


@pytest.mark.parametrize(("name", "hold_after"), [("one step", 1), ("eager, two", 2)])
def test_exchanges_go_on_while_files_are_written(
    name: str, hold_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written is what was there when the save began."""
    first, second = (new_run(name, "int4, fp32", 2) for _ in range(2))
    for step in range(1, 8):
        if step == 5:
            end_all(first)
            for transport in transports(first):
                transport.hold_after = hold_after
        first.train_step(loss)
    write = Snapshot.write

    def after_the_exchanges(snapshot: Snapshot) -> None:
        for transport in transports(first):
            transport.goes_on.set()
        end_all(first)
        write(snapshot)

    # cluster 0's file; cluster 1 then has all that was under way
    monkeypatch.setattr(Snapshot, "write", after_the_exchanges)
    save_all(first, tmp_path)
    resume(second, first, tmp_path)
    end_alike(first, second)


def test_a_rank_that_cannot_write_does_not_leave_the_others_in_a_collective(tmp_path: Path) -> None:
    run = new_run("one step", "dense", 2)
    for _ in range(4):
        run.train_step(loss)
    told: list[Any] = []
    ranks: Any = run.loops[0].adapter.ranks
    agree = ranks.max_over_ranks
    ranks.max_over_ranks = lambda values: told.append(values) or agree(values)
    (tmp_path / "0").write_text("no folder")
    with pytest.raises(FileExistsError):
        save_all(run, tmp_path)
    assert told


def test_what_is_launched_at_a_boundary_that_is_left_is_sent() -> None:
    """Though its memory is that of a mean that is late: the others come to have it meanwhile."""
    run = new_run("one step", "int4, fp32", 2)
    other, leaver = run.loops
    late = transports(run)[1]
    for step in range(1, 7):
        if step == 3:
            late.hold_after = AT_THE_END
        if step == 5:
            leaver.stop_place = Impatient()  # type: ignore[assignment]
        run.train_step(loss)
    assert leaver.deferral.is_deferred and len(leaver.in_flight) == 2
    late.hold_after = None
    late.goes_on.set()
    for loop in (leaver, other):
        transfer = loop.in_flight[-1]
        assert isinstance(transfer, Transfer) and transfer.launched == 6
        assert not isinstance(transfer.pending, NotSent)
        transfer.pending.wait()
