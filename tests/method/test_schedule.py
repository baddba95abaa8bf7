"""Which fragment is due when: brute force over all steps."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from dsx.core.types import History, Stage, SyncParams
from dsx.method.schedule.periodic import Periodic, Schedule, Streaming


def launches(
    schedule: Schedule,
    num_fragments: int,
    num_steps: int,
    stage: Stage = Stage(),  # noqa: B008 - frozen
    interval_at: Callable[[int], int] | None = None,
) -> list[list[int]]:
    """What is due at each step, every launch counted as applied at once."""
    history = History(num_fragments)
    schedule.advance(history, SyncParams(schedule.interval))
    steps = []
    for step in range(1, num_steps + 1):
        interval = interval_at(step) if interval_at else schedule.interval
        due = list(schedule.due(step, history, SyncParams(interval), stage))
        history.step = step
        for p in due:
            history.intervals[p] = step - history.launched[p]
            history.launched[p] = history.applied[p] = step
        schedule.advance(history, SyncParams(interval))
        steps.append(due)
    return steps


def test_periodic() -> None:
    assert launches(Periodic(3), 2, 7) == [[], [], [0, 1], [], [], [0, 1], []]


def test_streaming_offsets_of_four_fragments() -> None:
    due = launches(Streaming(20), 4, 45)
    assert {t + 1: f for t, f in enumerate(due) if f} == {
        5: [0], 10: [1], 15: [2], 20: [3], 25: [0], 30: [1], 35: [2], 40: [3], 45: [0],
    }  # fmt: skip


@given(st.integers(1, 40), st.data())
def test_streaming_sends_each_fragment_once_a_period(interval: int, data: st.DataObject) -> None:
    num_fragments = data.draw(st.integers(1, interval))
    due = launches(Streaming(interval), num_fragments, 3 * interval)
    assert all(len(step) <= 1 for step in due)
    for p in range(num_fragments):
        steps = [t + 1 for t, fragments in enumerate(due) if p in fragments]
        offset = (p + 1) * interval // num_fragments
        assert steps == [offset, offset + interval, offset + 2 * interval]


def test_periodic_follows_a_changing_interval() -> None:
    due = launches(Periodic(4), 1, 14, interval_at=lambda t: 4 if t <= 8 else 3)
    assert [t + 1 for t, fragments in enumerate(due) if fragments] == [4, 8, 11, 14]


def test_streaming_takes_a_new_interval_at_the_end_of_a_period() -> None:
    due = launches(Streaming(6), 2, 20, interval_at=lambda t: 6 if t < 9 else 4)
    assert {t + 1: f for t, f in enumerate(due) if f} == {
        3: [0], 6: [1], 9: [0], 12: [1], 14: [0], 16: [1], 18: [0], 20: [1],
    }  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_stages_take_turns(interval: int, num_stages: int, data: st.DataObject) -> None:
    """Stage s of S is shifted by floor(s*H/(P*S)); each still sends everything every H steps."""
    num_fragments = data.draw(st.integers(1, interval))
    for s in range(num_stages):
        due = launches(Streaming(interval), num_fragments, 4 * interval, Stage(s, num_stages))
        shift = s * interval // (num_fragments * num_stages)
        for p in range(num_fragments):
            steps = [t + 1 for t, fragments in enumerate(due) if p in fragments]
            first = (p + 1) * interval // num_fragments + shift
            assert steps[:3] == [first, first + interval, first + 2 * interval]


def test_stages_never_share_a_step_where_there_is_room() -> None:
    busy: list[int] = []
    for s in range(4):
        due = launches(Streaming(48), 3, 200, Stage(s, 4))
        busy += [t for t, fragments in enumerate(due) if fragments and t >= 48]
    assert len(busy) == len(set(busy))
