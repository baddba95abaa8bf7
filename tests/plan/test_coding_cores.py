"""The cores that a plan chooses for coding: the fewest that hide it, of those that a rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from dsx.config.schema import preset
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question, Search
from dsx.plan.coding_cores import beside_training, in_words, with_cores
from dsx.plan.given import Given, require_sense
from dsx.plan.link import Costs, Link
from dsx.plan.model import from_sizes
from dsx.plan.offer import block_of
from dsx.plan.variants import CODECS

FRAGMENTS = {"by": "layer", "num_fragments": 4, "pattern": "sequential"}
LATE = preset("diloco_delayed", schedule={"interval": 20}, fragments=FRAGMENTS)
# each fragment's copies, sums and hash take 40 s of a core; the line takes next to nothing
ASKED = Question(
    from_sizes(4e6, 4, None, 1), 5.0, Link(1e12), 2, costs=Costs(copy_bytes_per_second=4e5)
)


def chosen(**changes: Any) -> tuple[Candidate, Search]:
    search, nothing = Search(replace(ASKED, **changes)), cast(Any, None)
    told = search.predict(LATE)
    row = Candidate("diloco_delayed", CODECS[0], 4, LATE, told, nothing, 0, False, True)
    (found,) = with_cores([row], search)
    return found, search


def test_as_few_cores_as_hide_a_round_s_coding() -> None:
    """160 s of a core in a round of 100 s of compute: one is too few, and a third does nothing."""
    found, search = chosen()
    assert found.coding_cores == 2
    assert found.prediction == search.predict(LATE, cores=2)
    assert found.prediction.coding_seconds == pytest.approx(80.0, rel=1e-3)
    assert found.prediction.utilization == search.predict(LATE, cores=3).utilization
    assert search.predict(LATE, cores=1).round_seconds == pytest.approx(160.0, rel=1e-3)
    assert block_of(found, search.question)["coding"] == {"cores": 2}
    (line,) = in_words(found, search)
    assert line.startswith("coding on 2 cores of a rank, beside 2 that training keeps: 80 s of a")


def test_a_rank_that_has_too_few_is_planned_with_those_and_told() -> None:
    costs = replace(ASKED.costs, cores=1)
    found, search = chosen(costs=costs, cores_beside=1)
    assert found.coding_cores == 1
    assert found.prediction.round_seconds == pytest.approx(160.0, rel=1e-3)
    _, lacks = in_words(found, search)
    assert lacks.startswith("a rank has too few cores: 2 beside 2 that training keeps")
    assert "100.00 % of the time, 1 62.50 %" in lacks


def test_more_than_it_needs_are_left_to_others() -> None:
    found, search = chosen(costs=replace(ASKED.costs, cores=12), cores_beside=12)
    assert found.coding_cores == 2
    assert len(in_words(found, search)) == 1


@pytest.mark.parametrize("number", [3, None])
def test_a_number_that_is_given_is_left_as_it_is(number: int | None) -> None:
    """By the user; None: by a run that has told its own."""
    found, search = chosen(costs=replace(ASKED.costs, cores=3), coding_cores=number)
    assert found.coding_cores is None and in_words(found, search) == []
    block = block_of(found, search.question)
    assert block.get("coding") == (None if number is None else {"cores": 3})


def test_what_training_keeps_is_taken_off() -> None:
    assert [beside_training(cores) for cores in (1, 2, 3, 16)] == [1, 1, 1, 14]
    with pytest.raises(ValueError, match="leave one out"):
        require_sense(Given(coding_cores=2, cores_per_rank=8))
    with pytest.raises(ValueError, match="--cores-per-rank=0 must be 1 to 4096"):
        require_sense(Given(cores_per_rank=0))
