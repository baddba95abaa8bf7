"""The tables of Eager Updates."""

from __future__ import annotations

from pathlib import Path

from dsx.bench.paper.measure import baselines
from dsx.bench.paper.show import verdicts
from dsx.bench.paper.table import Row, Run
from dsx.bench.paper.tables import TABLES
from dsx.bench.paper.verdict import HOLDS


def test_the_bandwidths_are_those_printed_but_for_eleven(tmp_path: Path) -> None:
    table = TABLES["eager-table5"]
    samples = table.measure.measure(table.rows, Run(tmp_path, False, 1, tmp_path / "kept"))
    others = {
        row.label: [
            key for key, value in row.published.items() if samples[row.label][key] != [value]
        ]
        for row in table.rows
    }
    assert sum(len(row.published) for row in table.rows) == 60
    all_five = [f"gbps_{percent}" for percent in (50, 80, 90, 95, 99)]
    assert {label: keys for label, keys in others.items() if keys} == {
        "1B 1-outer-step FP4 H=100": all_five,
        "10B 1-outer-step FP4 H=30": ["gbps_50"],
        "10B 1-outer-step FP4 H=100": all_five,
    }
    assert [verdict.status for verdict in verdicts(table, samples)] == [HOLDS, HOLDS]


def test_a_gap_is_above_data_parallel_of_the_same_size() -> None:
    small, large = {"hidden_size": 32}, {"hidden_size": 64}
    rows = [
        Row("S", "data_parallel", study=small),
        Row("s", "eager", study={**small, "interval": 30}),
        Row("L", "data_parallel", study=large),
        Row("l", "eager", study=large),
        Row("m", "eager", study={"hidden_size": 128}),
    ]
    results = [
        (row, {"seed": seed, "val_loss": 10.0 * place + seed})
        for place, row in enumerate(rows)
        for seed in (0, 1)
    ]
    found = baselines(rows, results)
    assert found == {
        ("S", 0): 0.0, ("S", 1): 1.0, ("s", 0): 0.0, ("s", 1): 1.0,
        ("L", 0): 20.0, ("L", 1): 21.0, ("l", 0): 20.0, ("l", 1): 21.0,
    }  # fmt: skip
    only = baselines([rows[0], rows[4]], [results[0]])
    assert only["m", 0] == 0.0


def test_the_rows_of_training_are_methods_that_can_be_had() -> None:
    """With the fragments, rates and sizes of each; nothing is beyond what is stable by much."""
    import dsx
    from dsx.bench.convergence.task import BASELINE, Task, overrides
    from dsx.bench.paper.measure import Loss

    for name in ("eager-table2", "eager-fig4", "eager-replicas"):
        table = TABLES[name]
        assert isinstance(table.measure, Loss)
        for row in table.rows:
            study = table.measure._study(row, Run(Path(), False, 1, Path()))
            assert study.qk_norm and study.z_loss == 1e-4
            if row.preset == BASELINE:
                continue
            task = Task(row.preset, 0, choices=row.overrides)
            axes = overrides(study, task)
            method = dsx.preset(row.preset, study.num_clusters, **axes)
            assert method.schedule.interval == study.interval
            assert method.schedule.takes_turns
