"""The DreamDDP solver against brute force over all contiguous splits, and one case by hand."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import combinations_with_replacement
from math import comb, inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.bench.paper.layer_search import (
    assign_by_search,
    assign_by_trying,
    exposed_seconds,
    iteration_seconds,
)
from dsx.method.schedule.layer_assignment import (
    assign_layers,
    equal_numbers,
    fill_bubbles,
    layer_table,
)

Case = tuple[list[float], list[float], int]
MAX_SPLITS = 2000
BY_HAND = ([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0, 2.0])  # backward ends: 4, 3, 2, 1


def total_seconds(
    backward: list[float], transfer: list[float], table: Sequence[Collection[int]]
) -> float:
    return sum(iteration_seconds(backward, transfer, layers) for layers in table)


def simulate(backward: list[float], transfer: list[float], layers: tuple[int, ...]) -> float:
    """Closed form: the critical path starts at some sent layer and then sends all earlier ones."""
    paths = [
        sum(backward[layer:]) + sum(transfer[sent] for sent in layers if sent <= layer)
        for layer in layers
    ]
    return max([sum(backward), *paths])


def brute_force(backward: list[float], transfer: list[float], interval: int):
    """Return the least total, and the split that fills earlier iterations most among the best."""
    num_layers = len(backward)
    run_seconds = {
        (high, low): simulate(backward, transfer, tuple(range(low, high)))
        for high in range(num_layers + 1)
        for low in range(high + 1)
    }
    splits = [
        (num_layers, *reversed(cuts), 0)
        for cuts in combinations_with_replacement(range(num_layers + 1), interval - 1)
    ]
    totals = [
        sum(run_seconds[edges] for edges in zip(split, split[1:], strict=False)) for split in splits
    ]
    least = min(totals)
    # The lower the first cut, the more layers the first iteration takes.
    split = min(s for s, total in zip(splits, totals, strict=True) if total == least)
    runs = zip(split, split[1:], strict=False)
    return least, tuple(tuple(reversed(range(low, high))) for high, low in runs)


@st.composite
def cases(draw: st.DrawFn, seconds: st.SearchStrategy[float]) -> Case:
    num_layers = draw(st.integers(1, 12))
    fits = [h for h in range(1, 16) if comb(num_layers + h - 1, h - 1) <= MAX_SPLITS]
    scale = draw(st.sampled_from([0, 1, 3, 10]))
    layers = st.lists(seconds, min_size=num_layers, max_size=num_layers)
    return draw(layers), [scale * c for c in draw(layers)], draw(st.sampled_from(fits))


INTEGERS = cases(st.integers(0, 4).map(float))  # many ties, and sums without rounding
FLOATS = cases(st.floats(0, 1).map(lambda x: round(x, 4)))


@settings(max_examples=300)
@given(INTEGERS)
def test_least_total_and_the_documented_choice_among_ties(case: Case) -> None:
    least, split = brute_force(*case)
    assert assign_layers(*case) == split
    assert total_seconds(*case[:2], split) == least
    assert total_seconds(*case[:2], assign_by_search(*case)) == least


@settings(max_examples=25)
@given(INTEGERS)
def test_trying_all_finds_the_least_that_is_exposed(case: Case) -> None:
    tried = assign_by_trying(*case)
    exposed = exposed_seconds(*case[:2], tried)
    least, _ = brute_force(*case)
    assert exposed + case[2] * sum(case[0]) == total_seconds(*case[:2], tried) == least


@settings(max_examples=150)
@given(FLOATS)
def test_least_total_with_rounding(case: Case) -> None:
    least, _ = brute_force(*case)
    for solve in (assign_layers, assign_by_search):
        assert total_seconds(*case[:2], solve(*case)) == pytest.approx(least, rel=1e-12)


def random_case(rng: random.Random, num_layers: int, interval: int, ratio: float) -> Case:
    backward = [rng.expovariate(1.0) for _ in range(num_layers)]
    return backward, [ratio * rng.expovariate(1.0) for _ in range(num_layers)], interval


@pytest.mark.parametrize("seed", range(40))
def test_search_equals_dynamic_program_beyond_the_reach_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, interval = rng.randint(13, 40), rng.randint(1, 20)
    case = random_case(rng, num_layers, interval, ratio=rng.choice([0.5, 2.0, 8.0, 30.0]))
    seconds = [
        total_seconds(*case[:2], solve(*case)) for solve in (assign_layers, assign_by_search)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)


@settings(max_examples=100)
@given(FLOATS)
def test_every_layer_once_in_backward_order(case: Case) -> None:
    everything = list(reversed(range(len(case[0]))))
    for solve in (assign_layers, assign_by_search):
        table = solve(*case)
        assert len(table) == case[2]
        assert [layer for layers in table for layer in layers] == everything


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0, 100.0])
def test_a_hundred_layers_over_125_iterations(ratio: float) -> None:
    backward, transfer, interval = random_case(random.Random(7), 100, 125, ratio)
    assignment = assign_layers(backward, transfer, interval)
    assert len(assignment) == 125
    assert [layer for layers in assignment for layer in layers] == list(reversed(range(100)))
    found = total_seconds(backward, transfer, assignment)
    searched = assign_by_search(backward, transfer, interval)
    assert found == pytest.approx(total_seconds(backward, transfer, searched), rel=1e-12)
    table = layer_table(backward, transfer, interval)
    assert total_seconds(backward, transfer, table) == pytest.approx(found, rel=1e-12)


def test_two_iterations_by_hand() -> None:
    # Layers 3 and 2 travel 1..3 and 3..5: 5 s. Layers 1 and 0 travel 3..5 and 5..6: 6 s.
    # Layer 3 alone is hidden (4 s), but then 2, 1, 0 travel 2..4, 4..6, 6..7: 11 s as well,
    # and the tie goes to the assignment that takes more layers first.
    assert assign_layers(*BY_HAND, interval=2) == ((3, 2), (1, 0))
    assert total_seconds(*BY_HAND, [(3,), (2, 1, 0)]) == 4 + 7
    assert [iteration_seconds(*BY_HAND, layers) for layers in ((3, 2), (1, 0))] == [5, 6]
    # The channel idles for the first 3 s of iteration 1: layer 3 (1..3) fits, then 2 does not.
    assert layer_table(*BY_HAND, interval=2) == ((3, 2), (3, 1, 0))


def test_three_iterations_by_hand() -> None:
    # 3 is hidden (1..3), 2 is hidden (2..4), and 1, 0 expose 2 s (3..5, 5..6).
    assert assign_layers(*BY_HAND, interval=3) == ((3,), (2,), (1, 0))
    assert assign_by_search(*BY_HAND, interval=3) == ((3,), (2,), (1, 0))
    assert total_seconds(*BY_HAND, [(3,), (2,), (1, 0)]) == 4 + 4 + 6
    assert layer_table(*BY_HAND, interval=3) == ((3,), (2,), (3, 1, 0))


@pytest.mark.parametrize(
    ("num_layers", "interval", "sizes"),
    [(20, 5, [4] * 5), (7, 3, [3, 2, 2]), (2, 4, [1, 0, 1, 0]), (5, 1, [5])],
)
def test_equal_numbers_of_layers(num_layers: int, interval: int, sizes: list[int]) -> None:
    table = equal_numbers(num_layers, interval)
    assert sorted(map(len, table)) == sorted(sizes) and max(sizes) - min(sizes) <= 1
    assert [layer for layers in table for layer in layers] == [*reversed(range(num_layers))]


def test_one_iteration_sends_all_and_spare_iterations_repeat_what_is_hidden() -> None:
    assert assign_layers(*BY_HAND, interval=1) == ((3, 2, 1, 0),)
    assert assign_layers(*BY_HAND, interval=6) == ((3,), (2,), (1, 0), (), (), ())
    assert layer_table(*BY_HAND, interval=6) == ((3,), (2,), (3, 1, 0), (3,), (3,), (3,))


def test_filling_skips_what_does_not_fit_and_uses_bubbles_on_both_sides() -> None:
    backward, transfer = [1.0] * 6, [1.0, 1.0, 9.0, 1.0, 9.0, 1.0]
    assert fill_bubbles(backward, transfer, [(3,)]) == ((5, 3, 1),)  # 1..2, 3..4, 5..6


def test_filling_tolerates_rounding_only() -> None:
    assert 0.1 + 0.2 + 0.3 > 0.1 + 0.5  # layers 2 and 1 end with the backward, on paper
    assert fill_bubbles([0.5, 0.0, 0.1], [9.0, 0.3, 0.2], [()]) == ((2, 1),)
    assert fill_bubbles([0.3, 0.1], [9.0, 0.3 + 1e-15], [()]) == ((1,),)
    assert fill_bubbles([0.3, 0.1], [9.0, 0.3 + 1e-9], [()]) == ((),)


def fill_one_by_one(backward: list[float], transfer: list[float], layers: tuple[int, ...]):
    filled = layers
    for layer in reversed(range(len(backward))):
        longer = tuple(sorted({*filled, layer}, reverse=True))
        if simulate(backward, transfer, longer) <= simulate(backward, transfer, layers):
            filled = longer
    return filled


@settings(max_examples=100)
@given(INTEGERS)
def test_filling_is_greedy_from_the_output_end(case: Case) -> None:
    backward, transfer, _ = case
    assignment = assign_layers(*case)
    expected = tuple(fill_one_by_one(backward, transfer, layers) for layers in assignment)
    assert fill_bubbles(backward, transfer, assignment) == expected == layer_table(*case)


@settings(max_examples=100)
@given(FLOATS)
def test_filling_makes_no_iteration_longer_and_drops_no_layer(case: Case) -> None:
    backward, transfer, _ = case
    assignment = assign_layers(*case)
    for own, filled in zip(assignment, layer_table(*case), strict=True):
        assert set(own) <= set(filled)
        assert list(filled) == sorted(set(filled), reverse=True)
        limit = iteration_seconds(backward, transfer, own) * (1 + 1e-11)
        assert iteration_seconds(backward, transfer, filled) <= limit


@pytest.mark.parametrize(
    ("backward", "transfer", "interval", "message"),
    [
        ([1.0], [1.0, 2.0], 1, "1 entries and schedule.transfer_seconds has 2"),
        ([], [], 1, "0 entries and schedule.transfer_seconds has 0"),
        ([1.0, -1.0], [1.0, 1.0], 1, r"backward_seconds\[1\]=-1.0"),
        ([1.0], [nan], 1, r"transfer_seconds\[0\]=nan"),
        ([inf], [1.0], 1, r"backward_seconds\[0\]=inf"),
        ([1.0], [1.0], 0, "interval=0 must be at least 1"),
    ],
)
def test_errors(backward: list[float], transfer: list[float], interval: int, message: str) -> None:
    for solve in (assign_layers, layer_table):
        with pytest.raises(ValueError, match=message):
            solve(backward, transfer, interval)


@pytest.mark.parametrize("layers", [(-1,), (4,), (2, 2)])
def test_layers_outside_the_profile_are_errors(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"distinct and within 0\.\.3; use a table made from a"):
        fill_bubbles(*BY_HAND, [layers])
