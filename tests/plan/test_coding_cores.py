"""The cores that a plan chooses for coding: the fewest that hide it, of those that a rank has."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any, cast

import pytest
from rich.console import Console

from dsx.config.schema import preset
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question, Search
from dsx.plan.coding_cores import beside_training, in_words, with_cores
from dsx.plan.given import Given, require_sense
from dsx.plan.link import Costs, Link
from dsx.plan.model import from_sizes
from dsx.plan.offer import block_of
from dsx.plan.question import Read
from dsx.plan.ranking import best_of_each, ranked
from dsx.plan.show import Outputs, show_plan
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


def test_as_few_cores_as_hide_a_round_s_coding_at_half_the_speed() -> None:
    """160 s of a core in a round of 100 s of compute; at half the speed, 320 s."""
    found, search = chosen()
    assert found.coding_cores == 4
    assert found.prediction == search.predict(LATE, cores=4)
    assert found.prediction.coding_seconds == pytest.approx(40.0, rel=1e-3)
    slow = Search(replace(ASKED, costs=Costs(copy_bytes_per_second=2e5)))
    rounds = [slow.predict(LATE, cores=cores).round_seconds for cores in (3, 4, 5)]
    assert rounds == pytest.approx([120.0, 100.0, 100.0], rel=1e-3)
    assert search.predict(LATE, cores=1).round_seconds == pytest.approx(160.0, rel=1e-3)
    (line,) = in_words(found, search)
    assert line.startswith("coding needs 4 cores of a rank, beside 2 that training keeps: 40 s of")


def test_a_run_is_told_only_where_the_plan_knows_what_a_rank_has() -> None:
    found, search = chosen()
    assert found.coding_cores == 4 and "coding" not in block_of(found, search.question)
    found, search = chosen(costs=replace(ASKED.costs, cores=6), cores_beside=6)
    assert block_of(found, search.question)["coding"] == {"cores": 4}


@pytest.mark.parametrize(
    ("beside", "seconds", "less"), [(1, 160.0, "1 31.25 %"), (3, 100.0, "3 83.33 %")]
)
def test_a_rank_that_has_too_few_is_planned_with_those_and_told(
    beside: int, seconds: float, less: str
) -> None:
    """Also where they would do at the planned speed, as 3 do."""
    costs = replace(ASKED.costs, cores=beside)
    found, search = chosen(costs=costs, cores_beside=beside)
    assert found.coding_cores == beside
    assert found.prediction.round_seconds == pytest.approx(seconds, rel=1e-3)
    _, lacks = in_words(found, search)
    assert lacks.startswith("a rank has too few cores where coding takes 2 times as long: 4 beside")
    assert f"100.00 % of the time, {less}" in lacks


def test_more_than_it_needs_are_left_to_others() -> None:
    found, search = chosen(costs=replace(ASKED.costs, cores=12), cores_beside=12)
    assert found.coding_cores == 4
    assert len(in_words(found, search)) == 1


def test_the_least_interval_is_that_of_the_cores_that_a_plan_has_chosen() -> None:
    """160 s of coding on one core take 32 steps of 5 s; on four, 8."""
    row, search = chosen(target=0.999)
    found = [search.least_interval(replace(row, coding_cores=cores)) for cores in (1, 2, 4)]
    assert found == [32, 16, 8]


def test_what_would_reach_the_target_is_said_of_the_table_s_cores() -> None:
    """On a line of 4 kbit/s one core hides all coding, which then is too few on any better one."""
    costs = Costs(copy_bytes_per_second=4e5)
    question = replace(ASKED, link=Link(4e3), costs=costs, max_interval=20)
    printed, search = StringIO(), Search(question)
    assert not show_plan(Read(question), Outputs(), Console(file=printed))
    rows = with_cores(best_of_each(ranked(search.candidates(), question)), search)
    assert {row.coding_cores for row in rows} == {1}
    assert {search.least_bits_per_second(row) for row in rows} == {None}
    assert "what would:" in printed.getvalue() and "- a line of" not in printed.getvalue()


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
