"""Which fragment is due when: brute force over all steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsx.schedule.periodic import Periodic, Streaming
from dsx.types import History, Knobs


def launches(schedule: Periodic | Streaming, num_fragments: int, num_steps: int) -> list[list[int]]:
    history = History(num_fragments)
    steps = []
    for step in range(1, num_steps + 1):
        history.step = step
        steps.append(list(schedule.due(history, Knobs(schedule.interval))))
    return steps


def test_periodic() -> None:
    assert launches(Periodic(3), 2, 7) == [[], [], [0, 1], [], [], [0, 1], []]


def test_streaming_offsets_of_the_quickstart() -> None:
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
