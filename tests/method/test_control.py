"""DiLoCoX's adaptive rank and H: what it measures, what it decides, and that all decide alike."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dsx.config.schema import ConfigError, preset
from dsx.core.membership import Seat
from dsx.core.types import Fragment, History, Slot, Stage, SyncParams
from dsx.method.control.adaptive_rank import AdaptiveRank, leading_squares
from dsx.outer.measurements import Measurements
from tests.simulated import Simulated
from tests.tiny import TinyNet, mean_loss


def matrix_of_rank(
    rank: int, rows: int = 30, columns: int = 20, noise: float = 0.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rows, rank, generator=generator)
    b = torch.randn(rank, columns, generator=generator)
    return a @ b + noise * torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_leading_squares_are_those_of_the_singular_values(rank: int) -> None:
    matrix = matrix_of_rank(rank)
    exact = torch.linalg.svdvals(matrix).square()
    torch.testing.assert_close(leading_squares(matrix, 20), exact, rtol=1e-3, atol=1e-2)
    few = leading_squares(matrix, 4)
    assert few.sum() <= exact.sum() * (1 + 1e-5)
    assert few.sum() >= 0.9 * exact[:4].sum()


def decide_rounds(control: AdaptiveRank, matrix: torch.Tensor, rounds: int) -> list[int]:
    fragment = Fragment(0, 0, (Slot("w", tuple(matrix.shape), 0),))
    history, initial, ranks = History(1), SyncParams(20), list[int]()
    for _ in range(rounds):
        sync_params = control.sync_params(initial, history)
        measured = control.measure(matrix.reshape(-1), fragment, sync_params).tolist()
        control.decide(measured, sync_params, initial, history)
        ranks.append(control.sync_params(initial, history).rank or 0)
    return ranks


def test_the_rank_falls_to_what_is_needed_and_stays() -> None:
    ranks = decide_rounds(
        AdaptiveRank(rank=16, min_rank=1, max_rank=20, window=3), matrix_of_rank(4), 20
    )
    assert ranks[:2] == [16, 16] and ranks[2] in (4, 5)  # after a window
    assert set(ranks[2:]) == {ranks[2]}  # a fixed spectrum: no drift, up or down


@pytest.mark.parametrize("decays", [(2, 20), (2, 26), (2, 30), (3, 60), (5, 5)])
def test_fragments_with_different_spectra_share_one_rank_that_settles(
    decays: tuple[int, int],
) -> None:
    """Exact spectra that stay: the rank ends where all fragments together keep the target."""
    control = AdaptiveRank(rank=20, max_rank=128, step_seconds=1.0, round_seconds=1.0)
    history, initial = History(2), SyncParams(100)
    energies = [torch.exp(-2 * torch.arange(1.0, 129) / decay) for decay in decays]
    ranks: list[int] = []
    for _ in range(120):
        sync_params = control.sync_params(initial, history)
        assert sync_params.rank is not None
        for values in energies:
            kept = torch.where(torch.arange(128) < sync_params.rank, values, 0.0)
            measured = [*kept.tolist(), float(values.sum())]
            control.decide(measured, sync_params, initial, history)
        ranks.append(sync_params.rank)
    assert len(set(ranks[-60:])) == 1
    total = sum(energies)
    share = total.cumsum(0) / total.sum()
    needed = 1 + int((share < 0.95).sum())
    assert share[ranks[-1] - 1] >= 0.95 and ranks[-1] <= 1.5 * needed + 1


def test_a_rank_that_was_too_low_is_not_taken_again_soon() -> None:
    control = AdaptiveRank(rank=20, min_rank=1, max_rank=128, window=1)
    assert control.next_rank(30, 0.99, 17.0) == 20
    assert control.next_rank(30, 0.99, 17.0, too_low=20) == 30
    assert control.next_rank(30, 0.99, 17.0, too_low=19) == 20


def test_the_rank_grows_by_half_where_it_keeps_too_little() -> None:
    flat = torch.linalg.qr(matrix_of_rank(20, 20, 20)).Q  # all directions alike
    ranks = decide_rounds(AdaptiveRank(rank=4, min_rank=1, max_rank=20, window=2), flat, 10)
    assert ranks[1::2] == [6, 9, 14, 20, 20]


def test_h_follows_the_transfers_with_hysteresis_and_within_its_bounds() -> None:
    control = AdaptiveRank(rank=4, min_interval=8)
    history = History(2)
    history.step_seconds, history.transfer_seconds = 1.0, [10.0, 10.0]
    assert control.next_interval(100, 100, history) == 23  # 20 s of transfers, and a margin
    assert control.next_interval(25, 100, history) == 25  # close enough
    history.transfer_seconds = [0.5, 0.5]
    assert control.next_interval(100, 100, history) == 8
    history.transfer_seconds = [500.0, 500.0]
    assert control.next_interval(50, 100, history) == 100
    assert control.next_interval(50, 100, History(2)) == 50  # nothing measured yet


def test_every_cluster_takes_the_same_decision_in_a_run() -> None:
    """Four rounds of H = 8, then H = 4, in all clusters; the rank shows in the records."""
    method = preset(
        "dilocox",
        schedule={"interval": 8},
        fragments={"num_fragments": 2},
        compression={"type": "dense"},
        control={
            "rank": 6, "min_rank": 1, "max_rank": 6, "window": 4, "min_interval": 2, "target": 0.5,
            "step_seconds": 1.0, "round_seconds": 3.4,
        },
    )  # fmt: skip
    run = Simulated(TinyNet(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), method, 3)
    events: list[Any] = []
    run.loops[0]._on_sync = events.append
    for _ in range(60):
        run.train_step(mean_loss)
        assert run.loops[1].history == run.loops[0].history == run.loops[2].history
    launched = sorted({e["launched_step"] for e in events})
    assert launched[:6] == [8, 16, 24, 32, 40, 44]  # decided when round 4 was applied, at 40
    assert events[0]["rank"] == 6 and events[-1]["rank"] < 6


def test_a_shard_of_a_matrix_is_not_measured() -> None:
    fragment = Fragment(0, 0, (Slot("w", (15,), 0, start=3), Slot("v", (3, 3), 15)))
    x = torch.arange(24.0)
    measured = AdaptiveRank(rank=4, max_rank=5).measure(x, fragment, SyncParams(1, 4))
    assert measured[-1] == x[15:].square().sum()


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ({"rank": 2}, r"control.rank=2 must lie between control.min_rank=4"),
        ({"target": 1.0}, r"control.target=1.0 must be above 0 and below 1"),
        ({"window": 0}, r"control.window=0 must be at least 1"),
        ({"min_interval": 126}, r"min_interval=126 .* schedule.interval=125"),
        ({"step_seconds": 0}, r"control.step_seconds=0.0 must be a finite number above 0"),
    ],
)
def test_impossible_settings_are_refused(control: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preset("dilocox", control=control)


def test_h_must_not_fall_to_the_overlap() -> None:
    control = {"type": "adaptive_rank", "rank": 8, "min_interval": 5}
    with pytest.raises(ConfigError, match=r"min_interval=5 lets H fall to delay.steps=5: .* >= 6"):
        preset("streaming_diloco", delay={"steps": 5}, control=control)


@dataclass
class StageOfTwo:
    """What an agreement needs of an engine and its ranks, on one of two threads."""

    stage: Stage
    shared: list[torch.Tensor]
    meeting: threading.Barrier

    @property
    def ranks(self) -> StageOfTwo:
        return self

    def max_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        self.meeting.wait(10)
        self.shared[self.stage.index] = values
        self.meeting.wait(10)
        return torch.maximum(*self.shared)


@pytest.mark.parametrize(("schedule", "expected"), [("streaming", 14), ("periodic", 10)])
def test_the_stages_of_a_pipeline_take_one_interval(schedule: str, expected: int) -> None:
    """Rounds of 4 and 8 s, steps of 1 s; stage 1 ends its window five steps after stage 0."""
    control = {"rank": 4, "min_rank": 1, "max_rank": 8, "min_interval": 2}
    axes = {"schedule": {"type": schedule, "interval": 20}, "control": control}
    method = preset("dilocox", fragments={"by": "layer", "num_fragments": 1}, **axes)
    shared, meeting = [torch.zeros(0)] * 2, threading.Barrier(2)
    found: list[list[tuple[int, list[int]]]] = [[], []]

    def train(index: int) -> None:
        stage = Stage(index, 2)
        adapter: Any = StageOfTwo(stage, shared, meeting)
        measurements, history = Measurements(method, adapter, Seat.of(0, 1)), History(1, [10])
        schedule = method.schedule
        schedule.advance(history, method.control.sync_params(method.sync_params, history))
        for step in range(1, 61):
            sync_params = method.control.sync_params(method.sync_params, history)
            due = list(schedule.due(step, history, sync_params, stage))
            history.step, history.step_seconds = step, 1.0
            history.transfer_seconds = [4.0 * (index + 1)]
            for fragment in due:
                history.launched[fragment] = step
            if step == 15 + 6 * index:  # stage 1 is late for the first meeting, at step 20
                history.decisions["is_ripe"] = True
            measurements.end_boundary(history)
            sync_params = method.control.sync_params(method.sync_params, history)
            schedule.advance(history, sync_params)
            found[index].append((sync_params.interval, due))

    threads = [threading.Thread(target=train, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    intervals = [[interval for interval, _ in steps] for steps in found]
    assert intervals[0] == intervals[1] == [20] * 39 + [expected] * 21
    launches = [[t for t, (_, due) in enumerate(steps, start=1) if due] for steps in found]
    assert launches == (
        [[20, 40, 54], [30, 50]] if schedule == "streaming" else [[20, 40, 50, 60]] * 2
    )


def test_a_stage_waits_for_the_others_before_their_first_meeting_too() -> None:
    """A window that ends before it must not move this stage's H alone, nor be lost."""
    control = {"rank": 4, "min_rank": 1, "max_rank": 8, "min_interval": 2, "window": 1}
    axes = {"schedule": {"type": "streaming", "interval": 20}, "control": control}
    method = preset("dilocox", fragments={"by": "layer", "num_fragments": 1}, **axes)
    adapter: Any = StageOfTwo(Stage(0, 2), [], threading.Barrier(2))
    history = History(1, [10], step=41, transfer_seconds=[4.0], step_seconds=1.0)
    Measurements(method, adapter, Seat.of(0, 1)).end_boundary(history)
    method.control.decide([1.0] * 9, method.sync_params, method.sync_params, history)
    assert method.control.sync_params(method.sync_params, history).interval == 20
    assert history.decisions["is_ripe"] and history.next_settling == 60
