"""DreamDDP's tables: its models' layers, times solved from two figures, and what follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dsx
from dsx.bench.convergence.task import BASELINE, Task, overrides
from dsx.bench.paper import dreamddp
from dsx.bench.paper.layer_profiles import MODELS
from dsx.bench.paper.layer_search import exposed_seconds
from dsx.bench.paper.table import Row, Run, Table
from dsx.method.schedule.layer_assignment import layer_table

TABLES = {table.name: table for table in dreamddp.TABLES}
PLACES = [*dreamddp._PUBLISHED]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("ResNet-18", 11_173_962),
        ("ResNet-50", 23_705_252),
        ("GPT-2", 124_439_808 + 50257 * 768),  # and the head, which is tied, once more
        ("Llama-2", 176_431_616),
    ],
)
def test_layers_are_those_of_the_published_models(model: str, parameters: int) -> None:
    assert sum(layer.parameters for layer in MODELS[model]()) == parameters


@pytest.mark.parametrize(("model", "millions"), [("ResNet-18", 555.4), ("ResNet-50", 1297.8)])
def test_multiply_adds_of_convolutions_are_those_known(model: str, millions: float) -> None:
    macs = sum(layer.macs for layer in MODELS[model]() if layer.macs > 16 * layer.parameters
               or layer.parameters > 8192)  # fmt: skip
    assert macs / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(("model", "workers"), PLACES)
def test_times_give_the_two_figures_that_they_are_solved_from(model: str, workers: int) -> None:
    given = dreamddp.profile(model, workers)
    published = dreamddp._PUBLISHED[model, workers]
    for method in ("S-SGD", "FLSGD"):
        assert dreamddp.step_seconds(method, given) == pytest.approx(published[method])
    assert sum(given.backward) == pytest.approx(given.compute * 2 / 3)


@pytest.mark.parametrize(("model", "workers"), PLACES)
def test_predicted_rows_are_near_the_published_ones(model: str, workers: int) -> None:
    given = dreamddp.profile(model, workers)
    published = dreamddp._PUBLISHED[model, workers]
    for method in ("PLSGD-ENP", "DreamDDP"):
        predicted = dreamddp.step_seconds(method, given)
        assert predicted == pytest.approx(published[method], rel=0.16)


def test_filling_makes_no_iteration_longer() -> None:
    given = dreamddp.profile("GPT-2", 32)
    bare = dreamddp.assign_layers(given.backward, given.transfer, 10)
    seconds = given.compute + exposed_seconds(given.backward, given.transfer, bare) / 10
    assert dreamddp.step_seconds("DreamDDP", given) == pytest.approx(seconds)


def test_a_slower_link_takes_longer_in_proportion() -> None:
    one, four = (dreamddp.profile("GPT-2", 8, slower) for slower in (1.0, 4.0))
    assert one.backward == four.backward
    assert [4 * t for t in one.transfer] == pytest.approx(four.transfer)


@pytest.mark.parametrize("name", [name for name, t in TABLES.items() if t.measure.kind != "loss"])
def test_simulated_tables_have_a_figure_in_every_column(name: str) -> None:
    table: Table = TABLES[name]
    rows: tuple[Row, ...] = table.rows[-2:] if name == "dreamddp-fig15" else table.rows
    measure = table.measure
    for row in rows:
        figures = measure.figures_of(row, 0, True)  # type: ignore[attr-defined]
        assert {column.figure for column in table.columns} <= {*figures}
        assert all(value >= 0 for value in figures.values())


TABLES_OF_LOSSES = [table for table in dreamddp.TABLES if table.measure.kind == "loss"]


@pytest.mark.parametrize("table", TABLES_OF_LOSSES, ids=lambda table: table.name)
def test_rows_of_trainings_are_methods(table: Table) -> None:
    study = table.measure.full  # type: ignore[attr-defined]
    for row in table.rows:
        if row.preset != BASELINE:
            task = Task(row.preset, 0, choices=row.overrides)
            method = dsx.preset(row.preset, study.num_clusters, **overrides(study, task))
            assert f"H={method.schedule.interval}" in row.label
            method.schedule.validate(study.num_layers)


@pytest.mark.parametrize(
    ("name", "best"), [("dreamddp-table2", 573.1), ("dreamddp-table2-lm", 247.97)]
)
def test_published_seconds_stand_beside_the_shorter_period(name: str, best: float) -> None:
    rows = {row.label: row.published for row in TABLES[name].rows}
    assert {label for label, published in rows.items() if not published} == {
        "FLSGD H=20", "PLSGD-ENP H=20", "DreamDDP H=20"
    }  # fmt: skip
    seconds = [published["seconds_to_target"] for published in rows.values() if published]
    assert seconds == sorted(seconds, reverse=True)  # the paper's order, S-SGD first
    assert rows["DreamDDP H=5"]["seconds_to_target"] == best


def test_dreamddp_sends_more_of_what_stands_idle_than_equal_numbers_do() -> None:
    rows = {row.label: row for row in TABLES["dreamddp-table2"].rows}
    times = rows["DreamDDP H=20"].overrides["schedule"]
    table = layer_table(times["backward_seconds"], times["transfer_seconds"], 20)
    assert sum(map(len, table)) > 2 * 6  # equal numbers: each layer once


@pytest.mark.ci
def test_seconds_to_a_target_are_steps_times_those_of_a_step(tmp_path: Path) -> None:
    table = TABLES["dreamddp-table2"]
    tiny = replace(table.measure.short, num_clusters=2, num_steps=10, num_evaluations=2)  # type: ignore[attr-defined]
    measure = replace(table.measure, short=tiny, short_seeds=(0,))  # type: ignore[type-var]
    run = Run(tmp_path, True, 1, tmp_path / "kept.jsonl")
    samples = measure.measure(table.rows[:3], run)
    given = dreamddp.profile("ResNet-18", 8)
    step = {
        "S-SGD": 1.31,
        "ASC-WFBP": dreamddp.step_seconds("ASC-WFBP", given),
        "FLSGD H=5": given.compute + sum(given.transfer) / 5,
    }
    for label, figures in samples.items():
        (steps,), (seconds,) = figures["steps_to_target"], figures["seconds_to_target"]
        assert seconds == pytest.approx(steps * step[label])
    assert samples["S-SGD"]["val_loss"] == samples["ASC-WFBP"]["val_loss"]
