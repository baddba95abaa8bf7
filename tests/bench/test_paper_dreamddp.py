"""DreamDDP's tables: its models' layers, times solved from two figures, and what follows."""

from __future__ import annotations

import pytest

from dsx.bench.paper import dreamddp
from dsx.bench.paper.layer_profiles import MODELS
from dsx.bench.paper.layer_search import exposed_seconds
from dsx.bench.paper.table import Row, Table

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
