"""Invariants under random faults. 10,200 seeds: `pytest -m slow tests/comm/membership`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm.membership.faults import KINDS, run_seed
from tests.comm.membership.scenarios import SCENARIOS

BLOCK = 20


def blocks(first: int, end: int) -> list[range]:
    return [range(start, start + BLOCK) for start in range(first, end, BLOCK)]


def ids(seeds: range) -> str:
    return f"{seeds[0]}-{seeds[-1]}"


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(200, 205)),
        *[pytest.param(seeds, marks=pytest.mark.ci) for seeds in blocks(0, 80)],
        *[pytest.param(seeds, marks=pytest.mark.slow) for seeds in blocks(80, 10_200)],
    ],
    ids=ids,
)
def test_invariants_hold_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        try:
            run_seed(seed)
        except Exception as error:
            raise AssertionError(f"run_seed({seed}) does not hold: {error!r}") from error


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(seed, marks=pytest.mark.ci) for seed in range(1, 6)]]
)
def test_a_directed_scenario_holds(scenario: Callable[[int], None], seed: int) -> None:
    scenario(seed)


def test_faults_of_all_kinds_happen() -> None:
    counts = [run_seed(seed)[0].count for seed in (3, 4)]
    seen = sum(counts[1:], counts[0])
    assert not [kind for kind in KINDS if not seen[kind]]
    assert seen["commits"] > 30
