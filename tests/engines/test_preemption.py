"""A signal to one rank: every cluster saves at its own step, and goes on bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsx.comm.world import current_world
from dsx.core.exchange import Exchange
from dsx.core.transport import Pending, Submission
from dsx.outer.resuming import Unresumed
from dsx.training import parting
from tests.distributed import run_distributed
from tests.engines.engines import quiet
from tests.engines.resumes import PLACES, ROWS, build, differences, end, snapshot, take_step
from tests.installed import needs

pytestmark = needs("deepspeed")


class Told(NamedTuple):
    """Rank `who`, over all clusters (0, 1: cluster 0), gets a signal after step `at`.

    The other cluster has taken `ahead` steps by then: as many as it can, where it waits at the end
    of the last one for the first cluster. It hears of the end from step `heard_at` on. What `who`
    launches at step `withheld` does not get out before.
    """

    place: str
    row: str
    who: int
    at: int
    ahead: int
    heard_at: int = 0
    withheld: int = 0


QUICK = [
    Told("zero1", "diloco", 1, 9, 11),  # the other waits in the blocking round of step 12
    Told("zero1", "streaming, int4, feedback", 2, 9, 9),
]
MORE = [
    Told("zero1", "eager", 3, 10, 12),
    Told("zero3", "cocodc", 0, 9, 10),
    Told("zero1", "diloco_delayed", 0, 11, 13),
    Told("zero1", "diloco", 3, 12, 12),
    Told("zero1", "diloco_delayed", 2, 17, 20),  # the other is in finish()
    Told("zero1, bf16", "dilocox", 2, 13, 14),
    Told("pipeline, zero1", "diloco", 3, 9, 11),
    Told("pipeline, zero1", "streaming_diloco", 0, 9, 9),
    Told(
        "pipeline, zero1", "streaming_diloco", 0, 12, 12, heard_at=14, withheld=12
    ),  # one stage waits
]


def withhold(transport: Any, step: int) -> None:
    """Let nothing of what is launched at a step get out."""
    submit = transport.submit

    def submit_unless(what: Submission, exchange: Exchange, again: Any = None) -> Pending:
        return Unresumed(what) if what.step == step else submit(what, exchange)

    transport.submit = submit_unless


def train_until_told(engine: Any, told: Told, last: int, name: str) -> int:
    """Train; return the exit status where the run ends before its last step."""
    rank = 2 * engine.dsx.cluster_id + engine.global_rank
    own, other = engine.dsx.cluster_id, 1 - engine.dsx.cluster_id
    pace = current_world().rendezvous.group_store(name)
    preemption = engine.dsx.preemption
    if own != told.who // 2:
        hear = preemption._listen
        preemption._listen = lambda: hear() if engine.dsx.step >= told.heard_at else None
    if rank == told.who and told.withheld:
        withhold(engine.dsx.loop.transport, told.withheld)
    try:
        for step in range(1, last + 1):
            if own == told.who // 2 and step == told.at + 1:
                pace.wait([f"{other} took {told.ahead}"])
                if rank == told.who:
                    os.kill(os.getpid(), signal.SIGUSR2)
                until = time.monotonic() + 30  # steps are shorter here than a thread's turn
                while not preemption.place.reason and time.monotonic() < until:
                    time.sleep(0.01)
            take_step(engine, step)
            pace.set(f"{own} took {step}", "")
        engine.dsx.finish()
    except SystemExit as left:
        return left.code
    return 0


def end_and_go_on(base: str, all_told: list[Told]) -> list[Any]:
    quiet()
    parting._HARD_END_SECONDS = 1e6  # this process goes on
    results = []
    for index, told in enumerate(all_told):
        row, place = ROWS[told.row], PLACES[told.place]
        own = {"preemption_signals": ["SIGUSR2"], "grace_seconds": 20.0}
        whole = build(row, place)
        for step in range(1, row.last_step + 1):
            take_step(whole, step)
        whole.dsx.finish()
        kept = snapshot(whole)
        end(whole)
        engine = build(row, place, metrics={"dir": f"{base}/{index}"}, clusters=own)
        code = train_until_told(engine, told, row.last_step, f"pace {index}")
        stopped = engine.dsx.step
        base_of_run = engine.dsx.run_dir / "checkpoints"
        resumed = build(row, place)
        resumed.load_checkpoint(str(base_of_run))
        assert resumed.dsx.step == stopped
        for step in range(stopped + 1, row.last_step + 1):
            take_step(resumed, step)
        resumed.dsx.finish()
        different = differences(snapshot(resumed), kept)
        # whoever left before a mean came is given it after the resume, and sends no codes for it
        results.append([code, stopped, [name for name in different if name != "bytes sent"]])
        end(resumed)
    return results


def saved_and_gone_on_with(base: Path, all_told: list[Told], num_ranks: int = 4) -> None:
    ranks = run_distributed(end_and_go_on, num_ranks, str(base), all_told, timeout_seconds=250)
    for told, of_ranks in zip(all_told, zip(*ranks, strict=True), strict=True):
        assert [code for code, _, _ in of_ranks] == [128 + signal.SIGUSR2] * num_ranks, told
        assert [different for _, _, different in of_ranks] == [[]] * num_ranks, told
        steps = [stopped for _, stopped, _ in of_ranks]
        assert steps[0] == steps[1] and steps[2] == steps[3], (told, steps)
        first = 2 * (told.who // 2)
        assert told.at < steps[first] <= told.at + 2, (told, steps)
        assert steps[2 - first] >= told.ahead, (told, steps)


@pytest.mark.ci
def test_a_signal_to_one_rank_saves_all_and_all_go_on(tmp_path: Path) -> None:
    saved_and_gone_on_with(tmp_path, QUICK)


@pytest.mark.ci
@pytest.mark.parametrize(
    "told", MORE, ids=lambda told: f"{told.row}, {told.place}, {told.at}, {told.heard_at}"
)
def test_more_are_saved_and_go_on(tmp_path: Path, told: Told) -> None:
    saved_and_gone_on_with(tmp_path, [told])
