"""`dsx bench paper`: which orders of a table hold, and which are within noise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dsx.bench.paper.table import Claim, Column, Samples
from dsx.bench.paper.verdict import DIFFERS, HOLDS, NOISE, judge

LOSS = Column("val_loss", "loss")


def losses(**of_labels: list[float]) -> Samples:
    return {label: {"val_loss": values} for label, values in of_labels.items()}


def test_an_order_that_every_seed_confirms_holds() -> None:
    claim = Claim("val_loss", ("a", "b", "c"))
    samples = losses(a=[1.0, 1.1, 1.2], b=[1.3, 1.41, 1.5], c=[2.0, 2.0, 2.0])
    found = judge(claim, samples, "loss")
    assert found.status == HOLDS
    assert found.sentence == "The paper's order by loss, a < b < c, holds here (3 samples each)."


def test_what_is_reversed_is_named() -> None:
    claim = Claim("val_loss", ("a", "b", "c"))
    found = judge(claim, losses(a=[1.0, 1.1], b=[2.0, 2.1], c=[1.5, 1.6]), "loss")
    assert found.status == DIFFERS
    assert (
        "does not hold here: c is before b; of 3 pairs 2 hold (2 samples each)." in found.sentence
    )
    faster = Claim("val_loss", ("a", "b"), lower_is_better=False)
    found = judge(faster, losses(a=[1.0, 1.1], b=[2.0, 2.1]), "speed")
    assert found.status == DIFFERS
    assert "order by speed, a > b, does not hold here: b is before a" in found.sentence


def test_seeds_that_disagree_are_noise_and_the_same_seed_tells_apart() -> None:
    claim = Claim("val_loss", ("a", "b"))
    found = judge(claim, losses(a=[1.0, 1.2, 1.1], b=[1.1, 1.15, 1.2]), "loss")
    assert found.status == NOISE
    assert "is within noise here for a and b; of 1 pairs 0 hold" in found.sentence
    # seeds differ by far more than the rows do, and alike
    assert judge(claim, losses(a=[1.0, 2.0], b=[1.01, 2.01]), "loss").status == HOLDS


def test_no_order_within_a_group_and_one_sample_has_no_noise() -> None:
    claim = Claim("val_loss", ("a", ("b", "c")))
    found = judge(claim, losses(a=[1.0], b=[3.0], c=[2.0]), "loss")
    assert found.status == HOLDS
    assert "a < (b, c), holds here (one sample each: no spread is known)" in found.sentence
    found = judge(Claim("val_loss", ("b", "a")), losses(a=[1.0], b=[3.0]), "loss")
    assert found.sentence.endswith("(one sample each: no spread is known).")


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_a_difference_that_does_not_show_is_no_order(lower_is_better: bool) -> None:
    claim = Claim("val_loss", ("a", "b"), lower_is_better)
    for a, b in ((0.59, 0.5900008), (0.5900008, 0.59), (-0.59, -0.5900008)):
        found = judge(claim, losses(a=[a], b=[b]), "seconds")
        assert found.status == NOISE
        assert "is within noise here for a and b; of 1 pairs 0 hold" in found.sentence
    # seeds that agree on it do not make it show, and one that shows is an order as before
    assert judge(claim, losses(a=[1.0, 2.0], b=[1.0001, 2.0001]), "loss").status == NOISE
    status = HOLDS if lower_is_better else DIFFERS
    assert judge(claim, losses(a=[0.59], b=[0.593]), "seconds").status == status


def test_equality_is_a_claim_of_its_own() -> None:
    claim = Claim("val_loss", (("a", "b", "c"),), is_equal=True)
    found = judge(claim, losses(a=[1.0, 5.0], b=[1.0005, 5.0], c=[1.0, 5.0]), "loss")
    assert found.status == HOLDS
    assert found.sentence == "That a = b = c by loss holds here to 0.1 % (2 samples each)."
    found = judge(claim, losses(a=[1.0, 5.0], b=[1.1, 5.1], c=[1.0, 5.0]), "loss")
    assert found.status == DIFFERS
    assert "does not hold here to 0.1 %: a and b, b and c differ (2 samples each)" in found.sentence
    # the means are equal, the samples are not
    found = judge(claim, losses(a=[1.0, 5.0], b=[2.0, 4.0], c=[1.0, 5.0]), "loss")
    assert found.status == NOISE
    assert "is within noise here for a and b, b and c (2 samples each)." in found.sentence
    found = judge(claim, losses(a=[1.0], b=[math.nan], c=[1.0]), "loss")
    assert found.status == DIFFERS
    wide = replace(claim, tolerance=0.2)
    assert judge(wide, losses(a=[1.0], b=[1.1], c=[1.0]), "loss").status == HOLDS
    assert judge(wide, losses(a=[1.0], b=[1.3], c=[1.0]), "loss").status == DIFFERS
    zero = losses(a=[0.0], b=[0.0], c=[0.0])
    assert judge(claim, zero, "loss").status == HOLDS


@pytest.mark.parametrize(("order", "is_equal"), [((("a", "b"),), False), (("a", "b"), True)])
def test_an_order_has_places_and_equality_has_one(order: tuple[str, ...], is_equal: bool) -> None:
    with pytest.raises(ValueError, match="an order has places, equality has one"):
        Claim("val_loss", order, is_equal=is_equal)


def test_what_has_diverged_is_last() -> None:
    claim = Claim("val_loss", ("a", "b"))
    assert judge(claim, losses(a=[1.0, 1.0], b=[2.0, math.nan]), "loss").status == HOLDS
    assert judge(claim, losses(a=[1.0, math.inf], b=[2.0, 2.0]), "loss").status == DIFFERS
    assert judge(claim, losses(a=[math.nan], b=[math.nan]), "loss").status == NOISE
