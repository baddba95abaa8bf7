"""CoCoDC's tables: what is trained has the paper's shape, and its wall clock by hand."""

from __future__ import annotations

import pytest

import dsx
from dsx.bench.convergence.task import Task, overrides
from dsx.bench.paper import cocodc
from dsx.bench.paper.table import Row, Table
from dsx.core.types import History, SyncParams
from dsx.method.method import Method


def method_of(table: Table, row: Row) -> Method:
    task = Task(row.preset, 0, choices=row.overrides)
    return dsx.preset(row.preset, 4, **overrides(cocodc._STUDY, task))


@pytest.mark.parametrize("table", cocodc.TABLES[:2], ids=lambda table: table.name)
def test_adaptive_rows_send_eight_fragments_in_a_period_of_twenty(table: Table) -> None:
    adaptive = [row for row in table.rows if row.preset == "cocodc"]
    assert adaptive
    for row in adaptive:
        schedule = method_of(table, row).schedule
        history = History(4, rounds=[1] * 4)
        schedule.advance(history, SyncParams(schedule.interval))
        assert (schedule.interval, history.plan["transmissions"]) == (20, 8)


def test_all_rows_but_the_blocking_one_are_as_late() -> None:
    for table, steps in zip(cocodc.TABLES[:2], (1, 5), strict=True):
        late = [row for row in table.rows if row.preset != "diloco"]
        assert {method_of(table, row).delay.steps for row in late} == {steps}
    alone = {row.label: method_of(cocodc.TABLES[1], row) for row in cocodc.TABLES[1].rows}
    kinds = {label: type(method.delay).__name__ for label, method in alone.items()}
    assert kinds["adaptive transmission alone"] == kinds["Streaming DiLoCo"] == "StreamingMerge"
    assert kinds["compensation alone"] == kinds["CoCoDC"] == "DelayCompensation"


def test_the_wall_clock_by_hand() -> None:
    """A period of 100 s, behind which DiLoCo sends four fragments of 5 s at once."""
    found = {row.label: cocodc.wall_clock(row, 0, False) for row in cocodc.TABLES[2].rows}
    for label in ("CoCoDC", "Streaming DiLoCo"):
        assert found[label]["rate_all"] == pytest.approx(18.0, rel=1e-5)
        assert found[label]["latency_all"] == pytest.approx(18.0, rel=1e-5)
    assert found["DiLoCo"]["rate_all"] == pytest.approx(18.0 * 1.20, rel=1e-3)
    # four exchange rounds, where CoCoDC's norms travel in two more
    assert found["DiLoCo"]["latency_all"] == pytest.approx(18.0 * (1 + 0.05 * 4 / 5), rel=5e-3)
    assert found["DiLoCo"]["rate_to_20"] == pytest.approx(10.821 * 1.20, rel=1e-3)
