"""Prices and losses in a plan: sums that one can do by hand, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.plan.budget import Budget, bill_of, data_parallel_bill
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question, Search
from dsx.plan.link import Link
from dsx.plan.model import from_sizes

SIZES = ["--params", "7e9", "--layers", "32", "--hidden", "4096", "--gpus-per-cluster", "8"]
ASKED = [*SIZES, "--clusters", "4", "--step-seconds", "2", "--gbps", "1"]
FRAMES = 1514 / 1448
HOUR, DAY = 3600.0, 86400.0


def call(*more: str) -> Any:
    return CliRunner().invoke(app, ["plan", *ASKED, *more])


def first(num_clusters: int, preset: str) -> tuple[Candidate, Question]:
    question = Question(from_sizes(7e9, 32, 4096, 8), 2.0, Link(1e9), num_clusters)
    found = (c for c in Search(question).candidates() if c.preset == preset)
    return next(found), question


def test_money_is_accelerators_and_what_leaves_all_clusters() -> None:
    candidate, question = first(4, "recommended")
    day = bill_of(candidate, question, Budget(egress_price=0.02, gpu_hour_price=3.0))
    assert day.days is None and day.goodput is None
    assert day.gpu_price == 3.0 * 4 * 8 * 24
    found = candidate.prediction
    sent = sum(found.bytes_by_cluster) * DAY / found.round_seconds
    assert day.egress_price == pytest.approx(0.02 * sent * FRAMES / 1e9)
    assert day.price == pytest.approx(day.gpu_price + day.egress_price)
    run = bill_of(candidate, question, Budget(0.02, 3.0, steps=1e5))
    assert run.days is not None and run.price is not None and day.price is not None
    assert run.days == pytest.approx(1e5 * found.round_seconds / found.steps_per_round / DAY)
    assert run.price == pytest.approx(day.price * run.days)


def test_losses_take_healing_what_was_not_sent_and_a_moment_of_the_others() -> None:
    candidate, question = first(4, "diloco")
    bill = bill_of(candidate, question, Budget(mtbf_hours=10, heal_seconds=600))
    found = candidate.prediction
    not_sent = found.round_seconds / 2
    own = 10 * HOUR / (10 * HOUR + 600 + not_sent)
    others = 10 * HOUR / (10 * HOUR + 3 * 2)
    assert bill.goodput == pytest.approx(found.utilization * own * others)
    later = bill_of(candidate, question, Budget(mtbf_hours=1, heal_seconds=600))
    assert later.goodput is not None and bill.goodput is not None and later.goodput < bill.goodput


def test_a_round_under_way_is_lost_too() -> None:
    candidate, question = first(4, "diloco_delayed")
    bill = bill_of(candidate, question, Budget(mtbf_hours=10, heal_seconds=600))
    found = candidate.prediction
    own = 10 * HOUR / (10 * HOUR + 600 + 1.5 * found.round_seconds)
    assert bill.goodput == pytest.approx(found.utilization * own * 36000 / 36006)


def test_healing_is_twice_the_line_for_the_anchor_and_the_momentum() -> None:
    candidate, question = first(4, "recommended")
    bill = bill_of(candidate, question, Budget(egress_price=1.0, mtbf_hours=24))
    copied = question.model.numel * 4 * 2
    assert bill.heal_seconds == pytest.approx(2 * copied * 8 * FRAMES / 1e9)
    without = bill_of(candidate, question, Budget(egress_price=1.0, mtbf_hours=1e6))
    assert bill.egress_price is not None and without.egress_price is not None
    found = candidate.prediction
    trained = sum(found.bytes_by_cluster) * DAY / found.round_seconds
    kept = (bill.goodput or 0) / found.utilization
    assert bill.egress_price == pytest.approx((trained * kept + 4 * copied) * FRAMES / 1e9)


def test_two_wait_for_each_other_longer_than_four() -> None:
    two, asked_of_two = first(2, "diloco")
    four, asked_of_four = first(4, "diloco")
    budget = Budget(mtbf_hours=10, heal_seconds=600)
    kept = [
        (bill_of(c, q, budget).goodput or 0) / c.prediction.utilization
        for c, q in ((two, asked_of_two), (four, asked_of_four))
    ]
    assert kept[0] < kept[1]


def test_where_nobody_comes_back_all_begin_again() -> None:
    candidate, question = first(4, "dreamddp")
    unknown = bill_of(candidate, question, Budget(mtbf_hours=10))
    assert unknown.goodput is None and unknown.heal_seconds is None
    bill = bill_of(candidate, question, Budget(mtbf_hours=10, heal_seconds=600))
    expected = candidate.prediction.utilization * 36000 / (36000 + 4 * 600)
    assert bill.goodput == pytest.approx(expected)


def test_saves_hold_all_up_and_are_what_a_restart_goes_back_to() -> None:
    candidate, question = first(4, "recommended")
    found = candidate.prediction
    step = found.round_seconds / found.steps_per_round
    share = 1000 * step / (1000 * step + 30)
    saves = Budget(gpu_hour_price=1.0, steps=1e5, save_every=1000, save_seconds=30)
    bill, without = (bill_of(candidate, question, b) for b in (saves, Budget(1.0, 1.0, 1e5)))
    assert bill.goodput == pytest.approx(found.utilization * share)
    assert bill.days is not None and without.days is not None
    assert bill.days == pytest.approx(without.days / share)
    assert bill.gpu_price == pytest.approx(32 * 24 * bill.days)
    lossy = replace(saves, mtbf_hours=10, heal_seconds=600)
    unsaved = bill_of(candidate, question, replace(lossy, save_every=None, save_seconds=None))
    both = bill_of(candidate, question, lossy)
    assert both.goodput == pytest.approx((unsaved.goodput or 0) * share)
    restarted, asked = first(4, "dreamddp")
    told = bill_of(restarted, asked, replace(lossy, save_seconds=0.0))
    own = restarted.prediction
    again = 500 * own.round_seconds / own.steps_per_round
    expected = own.utilization * 36000 / (36000 + 4 * (600 + again))
    assert told.goodput == pytest.approx(expected)
    parallel = Search(question).data_parallel()
    day = data_parallel_bill(parallel, question, saves)
    waited = 1000 * parallel.round_seconds / (1000 * parallel.round_seconds + 30)
    assert day.days == pytest.approx(1e5 * parallel.round_seconds / waited / DAY)


def test_data_parallel_is_priced_beside_it() -> None:
    _, question = first(4, "diloco")
    found = Search(question).data_parallel()
    bill = data_parallel_bill(found, question, Budget(gpu_hour_price=1.0, steps=1000))
    assert bill.days == pytest.approx(1000 * found.round_seconds / DAY)
    assert bill.gpu_price == pytest.approx(32 * 24 * bill.days)


def test_the_table_has_the_columns_that_were_asked_for() -> None:
    plain = call("--top", "2").stdout
    assert "goodput" not in plain and "cost" not in plain
    priced = call("--top", "2", "--egress-price", "0.05", "--mtbf", "100").stdout
    assert "goodput" in priced and "cost per" in priced and "days" not in priced
    assert "0.05 a GB that leaves a cluster" in priced and "once in 100 h" in priced
    saved = call("--top", "2", "--save-every", "100", "--save-seconds", "5").stdout
    assert "goodput" in saved and "every 100 steps training waits 5 s" in saved
    run = call("--top", "2", "--gpu-hour-price", "2", "--steps", "1e5").stdout
    assert "days" in run and "the run" in run and "32 accelerators at 2 an hour" in run
    assert "data parallel over this line" in run and "days and " in run


def test_json_has_the_budget_and_each_bill() -> None:
    record = json.loads(call("--json", "--egress-price", "0.05", "--steps", "1e4").stdout)
    assert record["budget"]["egress_price"] == 0.05 and record["budget"]["mtbf_hours"] is None
    for row in record["candidates"]:
        assert row["bill"]["egress_price"] > 0 and row["bill"]["gpu_price"] is None
    assert all(r["bill"] is None for r in json.loads(call("--json").stdout)["candidates"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--egress-price", "-1"], "--egress-price=-1 must be 0 to 1000000"),
        (["--mtbf", "0"], "--mtbf=0 must be 0.01 to 1000000"),
        (["--heal-seconds", "60"], "--heal-seconds goes with --mtbf"),
        (["--save-every", "100"], "--save-every goes with --save-seconds"),
        (["--save-seconds", "1"], "--save-seconds goes with --save-every"),
        (["--steps", "0"], "--steps=0 must be 1 to"),
        (["--gpu-hour-price", "nan"], "--gpu-hour-price=nan must be"),
    ],
)
def test_what_makes_no_sense_is_refused(more: list[str], said: str) -> None:
    result = call(*more)
    assert result.exit_code == 2 and said in result.stderr


def test_a_row_costs_the_same_whatever_else_is_asked() -> None:
    candidate, question = first(4, "recommended")
    both = bill_of(candidate, question, Budget(0.02, 3.0))
    alone = bill_of(replace(candidate), question, Budget(gpu_hour_price=3.0))
    assert alone.gpu_price == both.gpu_price and alone.egress_price is None
    assert alone.price == alone.gpu_price
