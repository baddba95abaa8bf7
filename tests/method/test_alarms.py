"""When the guard's averages are out of bounds, and how often that is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsx.config.schema import load_config, preset
from dsx.core.types import History
from dsx.method.alarms import FEWEST, FIRST_PAUSE, judge

DILOCO, SHIFT = preset("diloco", 2), preset("recommended", 2)


def rounds(values: dict[str, float], count: int, method: Any = DILOCO) -> list[tuple[int, str]]:
    history, found = History(2), list[tuple[int, str]]()
    for round in range(1, count + 1):
        history = History.from_state_dict(json.loads(json.dumps(history.state_dict())))
        for alarm in judge(1, round, values, history, method):
            if alarm.is_told:
                found.append((round, alarm.sentence("fragment 1", round, 3)))
    return found


@pytest.mark.parametrize(
    "values",
    [
        {"autocorrelation": 0.9, "effective_gain": 4.5},
        {"cluster_cosine": 0.02, "norm_ratio": 1.3},
        {"norm_ratio": 0.8},
        {},
    ],
)
def test_what_sound_runs_have_is_not_told(values: dict[str, float]) -> None:
    assert not rounds(values, 50)


def test_an_alarm_is_told_from_the_fifth_round_and_then_ever_less() -> None:
    told = rounds({"effective_gain": 8.0}, 200)
    steps = [FEWEST]
    while steps[-1] + FIRST_PAUSE * 2 ** (len(steps) - 1) <= 200:
        steps.append(steps[-1] + FIRST_PAUSE * 2 ** (len(steps) - 1))
    assert [round for round, _ in told] == steps
    assert told[0][1] == (
        "fragment 1, round 5: effective_gain is 8 on average, above 5: the outer step is too long "
        "for what a round says; lower outer_optimizer.lr or momentum (docs/methods/guard.md)"
    )


def test_one_round_alone_is_no_alarm() -> None:
    history = History(1)
    for round in range(1, 30):
        figures = {"norm_ratio": 1.7 if round == 12 else 1.0}
        assert not judge(0, round, figures, history, DILOCO)


def test_a_cluster_is_named_and_its_own_progress_has_its_own_bound() -> None:
    assert (
        "norm_ratio of cluster 3 is 18 on average, above 3" in rounds({"norm_ratio": 18.0}, 5)[0][1]
    )
    assert "is 0.5 on average, below 0.74" in rounds({"norm_ratio": 0.5}, 5)[0][1]
    assert not rounds({"effective_gain": 3.0}, 5)
    assert "own progress kept" in rounds({"effective_gain": 3.0}, 5, SHIFT)[0][1]


def test_the_action_is_a_section_of_its_own() -> None:
    block: dict[str, Any] = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    assert load_config({"dsx": block}).method.guard == "warn"
    off = load_config({"dsx": {**block, "guard": {"action": "off"}}})
    assert off.method.guard == "off" and not off.method.guards
    assert off.common()["guard"] == off.block()["guard"] == {"action": "off"}
