"""The edge of stability: the printed table, closed forms, and the recursion run round by round."""

from __future__ import annotations

import math

import pytest

from dsx.method.stability import LinearRule, largest_stable_rate, too_few_rounds

# The table of the design notes. Columns: (delay_rounds, clusters of the eager form or None).
COLUMNS = [(0, None), (1, None), (1, 2), (1, 4), (1, 8), (1, 32), (2, 2), (2, 4)]
TABLE: list[tuple[LinearRule, float, list[float]]] = [
    ("nesterov", 0.9, [1.357, 0.253, 0.770, 0.416, 0.320, 0.268, 0.303, 0.131]),
    ("nesterov", 0.5, [1.500, 0.562, 1.186, 0.766, 0.648, 0.581, 0.921, 0.458]),
    ("momentum", 0.9, [3.800, 0.100, 0.200, 0.133, 0.114, 0.103, 0.105, 0.069]),
    ("momentum", 0.5, [3.000, 0.500, 1.000, 0.667, 0.571, 0.516, 0.667, 0.393]),
    ("sgd", 0.0, [2.000, 1.000, 2.000, 1.333, 1.143, 1.032, 2.000, 0.915]),
]
CELLS = [
    (rule, momentum, delay, clusters, printed)
    for rule, momentum, row in TABLE
    for (delay, clusters), printed in zip(COLUMNS, row, strict=True)
]
NUM_ROUNDS = 10_000
BLOWN_UP = 1e3


def limit(rule: LinearRule, momentum: float, delay: int, clusters: int | None) -> float:
    return largest_stable_rate(rule, momentum, delay, 1 / clusters if clusters else 0.0)


@pytest.mark.parametrize(("rule", "momentum", "delay", "clusters", "printed"), CELLS)
def test_equals_the_printed_table(
    rule: LinearRule, momentum: float, delay: int, clusters: int | None, printed: float
) -> None:
    assert limit(rule, momentum, delay, clusters) == pytest.approx(printed, rel=0, abs=5e-4)


@pytest.mark.parametrize("mu", [0.0, 0.2, 0.5, 0.9, 0.99])
def test_closed_forms(mu: float) -> None:
    def is_close(value: float, expected: float) -> bool:
        return math.isclose(value, expected, rel_tol=1e-7)

    assert is_close(largest_stable_rate("nesterov", mu), 2 * (1 + mu) / (1 + 2 * mu))
    assert is_close(largest_stable_rate("momentum", mu), 2 * (1 + mu))
    assert is_close(largest_stable_rate("momentum", mu, 1), 1 - mu)
    for clusters in (2, 4, 8, 32):  # the roots' product, x * (1-s) + mu, is 1 at the edge
        late = 1 - 1 / clusters
        assert is_close(largest_stable_rate("momentum", mu, 1, 1 / clusters), (1 - mu) / late)


@pytest.mark.parametrize("delay", range(5))
def test_delayed_sgd_has_the_textbook_limit(delay: int) -> None:
    expected = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert math.isclose(largest_stable_rate("sgd", 0.0, delay), expected, rel_tol=1e-7)


def test_the_rules_meet_without_momentum_and_without_delay() -> None:
    for delay, share in ((0, 0.0), (1, 0.0), (1, 0.25), (2, 0.5)):
        sgd = largest_stable_rate("sgd", 0.0, delay, share)
        assert sgd == pytest.approx(largest_stable_rate("nesterov", 0.0, delay, share), rel=1e-7)
        assert sgd == pytest.approx(largest_stable_rate("momentum", 0.0, delay, share), rel=1e-7)
    # One cluster has only its own, fresh share: eager overlap is then the blocking rule.
    alone = largest_stable_rate("nesterov", 0.9, 2, 1.0)
    assert alone == pytest.approx(largest_stable_rate("nesterov", 0.9), rel=1e-7)


def run_separate_anchors(
    rule: LinearRule, momentum: float, delay: int, clusters: int | None, rate: float
) -> list[list[float]]:
    """Return every round's anchors: `E = D' + (own D - own D') / C`, D' being `delay` rounds late.

    Without `clusters`, two clusters of the naive delay, `E = D'`. kappa is 1, the optimum 0.
    """
    anchors = [1.0 + 0.1 * m for m in range(clusters or 2)]
    buffers = [0.0] * len(anchors)
    history = [anchors]
    for k in range(NUM_ROUNDS):
        own = history[k]
        late = history[k - delay] if k >= delay else [0.0] * len(own)
        mean = sum(late) / len(late)
        moved: list[float] = []
        for m, anchor in enumerate(own):
            grad = mean + (own[m] - late[m]) / clusters if clusters else mean
            buffers[m] = momentum * buffers[m] + grad
            step = {
                "nesterov": grad + momentum * buffers[m],
                "momentum": buffers[m],
                "sgd": grad,
            }[rule]
            moved.append(anchor - rate * step)
        history.append(moved)
        if abs(moved[0]) > BLOWN_UP:
            break
    return history


@pytest.mark.parametrize(
    ("rule", "momentum", "delay", "clusters"),
    [
        ("nesterov", 0.9, 0, None),
        ("momentum", 0.5, 0, None),
        ("sgd", 0.0, 0, None),
        ("nesterov", 0.9, 1, None),
        ("momentum", 0.9, 1, None),
        ("sgd", 0.0, 1, None),
        ("nesterov", 0.9, 1, 2),
        ("nesterov", 0.9, 1, 4),
        ("nesterov", 0.5, 1, 8),
        ("momentum", 0.9, 1, 2),
        ("sgd", 0.0, 1, 2),
        ("sgd", 0.0, 1, 4),
        ("nesterov", 0.9, 2, 2),
        ("nesterov", 0.9, 2, 4),
        ("nesterov", 0.5, 2, 2),
        ("momentum", 0.5, 2, 4),
        ("sgd", 0.0, 2, 2),
    ],
)
def test_the_recursion_itself_decays_below_the_limit_and_blows_up_above(
    rule: LinearRule, momentum: float, delay: int, clusters: int | None
) -> None:
    edge = limit(rule, momentum, delay, clusters)
    below = run_separate_anchors(rule, momentum, delay, clusters, 0.98 * edge)
    means = [abs(sum(anchors) / len(anchors)) for anchors in below]
    assert max(means[-100:]) < 0.01 * max(means[:100])
    # The paper's form never undoes what the anchors differ by at the start, but must not add to it.
    assert max(max(anchors) - min(anchors) for anchors in below[-100:]) < 2
    above = run_separate_anchors(rule, momentum, delay, clusters, 1.02 * edge)
    assert abs(above[-1][0]) > BLOWN_UP


def test_an_impossible_argument_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rule='adam' must be one of nesterov, momentum, sgd"):
        largest_stable_rate("adam", 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"momentum=1.0 must be at least 0 and below 1"):
        largest_stable_rate("nesterov", 1.0)
    with pytest.raises(ValueError, match=r"momentum=0.9 must be 0 for rule='sgd'"):
        largest_stable_rate("sgd", 0.9)
    with pytest.raises(ValueError, match=r"delay_rounds=-1 must be 0 or more"):
        largest_stable_rate("sgd", 0.0, -1)
    with pytest.raises(ValueError, match=r"fresh_share=2.0 must be from 0 to 1"):
        largest_stable_rate("sgd", 0.0, 1, 2.0)
    with pytest.raises(ValueError, match=r"num_rounds=nan must be 0 or more"):
        too_few_rounds(math.nan, 0.9)


def test_too_few_rounds_counts_memories_of_the_momentum() -> None:
    assert too_few_rounds(99, 0.9) and not too_few_rounds(100, 0.9)
    assert too_few_rounds(19.5, 0.5) and not too_few_rounds(20, 0.5)
    assert too_few_rounds(9, 0.0) and not too_few_rounds(10, 0.0)
