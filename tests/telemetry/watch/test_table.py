"""Tables in bounded memory: nothing is lost that is added up, and what is not a number shows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsx.telemetry.watch.table import Merge, Table, in_buckets

COLUMNS: dict[str, Merge] = {
    "step": "last", "seconds": "sum", "loss": "mean", "low": "low", "high": "high", "gain": "known",
}  # fmt: skip


def filled(rows: int, most: int) -> Table:
    table = Table(COLUMNS, most)
    for step in range(1, rows + 1):
        gain = float(step) if step % 2 else math.nan
        table.append((step, 0.5, step, step, step, gain))
    return table


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 100, 1000, 5001])
def test_a_table_stays_within_its_rows_and_loses_nothing(rows: int) -> None:
    table = filled(rows, 8)
    found = table.read()
    assert len(table) == len(found["step"]) <= 8
    assert found["seconds"].sum() == rows / 2
    assert table.last() == (rows or None)
    if rows:
        assert found["step"][-1] == rows
        assert found["low"][0] == 1
        assert found["high"].max() == rows


def test_all_rows_but_the_last_stand_for_equally_many_records() -> None:
    table = filled(1000, 16)
    steps = np.diff(table.read()["step"], prepend=0)
    assert set(steps[:-1]) == {table.records_per_row}
    assert steps[-1] <= table.records_per_row
    assert table.records_per_row == 64


def test_a_mean_is_no_number_where_one_was_none_and_a_known_one_is_of_the_others() -> None:
    table = Table({"step": "last", "loss": "mean", "gain": "known", "high": "high"}, 4)
    for step, value in enumerate([1.0, math.nan, 3.0, 5.0]):
        table.append((step, value, value, value))
    found = table.read()
    assert math.isnan(found["loss"][0])
    assert found["gain"][0] == found["high"][0] == 1.0
    assert found["loss"][-1] == 4.0


def test_what_comes_again_takes_the_place_of_what_was_there() -> None:
    table = filled(20, 64)
    table.cut(11)
    assert table.last() == 10
    table.append((11, 0.5, 0, 0, 0, 0))
    assert list(table.read()["step"]) == list(range(1, 12))


@pytest.mark.parametrize("how", ["low", "high", "sum", "mean", "known", "last"])
def test_buckets_are_the_same_as_one_after_the_other(how: Merge) -> None:
    chance = np.random.default_rng(0)
    values = np.where(chance.random(50) < 0.2, np.nan, chance.normal(size=50))
    starts = np.array([3, 3, 10, 11, 11, 30, 44])
    found = in_buckets(how, values, starts)
    plain = {
        "low": np.fmin.reduce, "high": np.fmax.reduce, "mean": np.mean, "last": lambda v: v[-1],
        "sum": lambda v: np.nan if np.isnan(v).all() else np.nansum(v),
        "known": lambda v: np.nan if np.isnan(v).all() else np.nanmean(v),
    }[how]  # fmt: skip
    for bucket, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        expected = plain(values[start:end]) if end > start else np.nan
        np.testing.assert_allclose(found[bucket], expected)
