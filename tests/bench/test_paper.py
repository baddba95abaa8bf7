"""`dsx bench paper`: what it lists and refuses, its verdicts, and a table of seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import dsx
from dsx.bench.convergence import pool
from dsx.bench.convergence.figures import common_target, perplexity, reach
from dsx.bench.convergence.pool import FORMAT, identity, read_kept
from dsx.bench.convergence.runs import run_task
from dsx.bench.convergence.task import BASELINE, Study, Task, inner_rate, merge, overrides
from dsx.bench.e2e.row import Row as LineRow
from dsx.bench.paper import show
from dsx.bench.paper.lines import overlaps_of
from dsx.bench.paper.measure import Lines, Loss, Several, Simulation
from dsx.bench.paper.scaling import Scaling
from dsx.bench.paper.table import Claim, Column, Row, Run, Samples, Table
from dsx.bench.paper.tables import TABLES, complete
from dsx.bench.paper.verdict import DIFFERS, HOLDS, NOISE
from dsx.cli import app
from dsx.config import schema
from dsx.data import BuildSummary, SkippedFiles, SplitSummary, read_summary
from dsx.method.choices import PRESETS
from tests.bench.corpus import build_corpus

LOSS = Column("val_loss", "loss")


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_table_can_be_run(table: Table) -> None:
    full, short = table.measure.full_and_short_minutes
    assert 0 < full < 30 and 0 < short < 5
    assert table.rows and table.columns and table.claims
    for row in table.rows:
        name = row.preset.partition("+")[0]
        assert name == BASELINE or name in PRESETS or isinstance(table.measure, Simulation)
    parts = table.measure.parts if isinstance(table.measure, Several) else (table.measure,)
    for part in parts:
        if isinstance(part, Loss):
            assert len(part.seeds) >= 2 or part.seeds == part.short_seeds, "no spread is known"


def test_every_table_is_in_the_overview() -> None:
    overview = (Path(__file__).parents[2] / "docs/results/papers/index.md").read_text()
    assert [name for name in TABLES if f"| `{name}` |" not in overview] == []


def test_names_are_listed_completed_and_refused_with_the_near_ones() -> None:
    listed = CliRunner().invoke(app, ["bench", "paper"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.output for name in TABLES)
    assert complete("dilocox-f") == [
        "dilocox-fig3",
        "dilocox-fig3b",
        "dilocox-fig4",
        "dilocox-fig4-line",
    ]
    refused = CliRunner().invoke(app, ["bench", "paper", "dilocox-table2"])
    assert refused.exit_code == 2
    assert "there is no table 'dilocox-table2'; near it: dilocox-table1" in refused.output


def test_a_missing_corpus_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    command = ["bench", "paper", "dilocox-table1", "--data", str(tmp_path / "none")]
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 2
    assert "make one with: dsx data build --from stdlib --out" in result.output


def test_a_claim_is_of_labels_and_figures_that_the_table_has() -> None:
    rows, measure = (Row("a", "diloco"), Row("b", "eager")), Simulation(lambda *_: {})
    with pytest.raises(ValueError, match="a claim is of labels .'c'."):
        Table("t", "", "", rows, (LOSS,), (Claim("val_loss", ("a", "c")),), measure)
    with pytest.raises(ValueError, match="a figure 'speed'"):
        Table("t", "", "", rows, (LOSS,), (Claim("speed", ("a", "b")),), measure)


def test_a_simulation_is_shown_beside_what_is_published(tmp_path: Path) -> None:
    table = Table(
        "some-table", "A Paper, Table 9", "numbers",
        (Row("one", "", published={"x": 1.5}), Row("two", "")),
        (Column("x", "x of it", "{:.2f}"),),
        (Claim("x", ("one", "two")),),
        Simulation(lambda row, seed, short: {"x": len(row.label) + seed / 10}, seeds=(0, 1)),
    )  # fmt: skip
    samples = table.measure.measure(table.rows, Run(tmp_path, True, 1, tmp_path / "kept"))
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    show.show(table, samples, console)
    text = console.export_text()
    assert "some-table: numbers (A Paper, Table 9)" in text
    assert "3.05 +- 0.07" in text
    assert "1.50" in text and "within noise here for one and two" in text
    plain = json.loads(json.dumps(show.as_json(table, samples, short=True)))
    assert plain["rows"][0]["samples"]["x"] == [3.0, 3.1]
    assert plain["verdicts"][0]["status"] == NOISE
    show.plot(table, samples, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_steps_and_bytes_to_a_target_loss() -> None:
    curve = [(10, 3.0, 100), (20, 2.0, 200), (30, 2.5, 300), (40, 1.0, 400)]
    assert reach(curve, 2.25) == (17.5, 175.0)
    assert reach(curve, 3.5) == (10, 100)
    assert reach(curve, 0.5) is None
    worse = [(10, 3.0, 1), (20, 1.5, 2)]
    assert common_target([{"curve": curve}, {"curve": worse}]) == 1.5
    assert common_target([{"curve": [(1, math.nan, 1)]}, {"curve": worse}]) == 1.5
    assert perplexity(math.log(20)) == pytest.approx(20)
    assert perplexity(1e6) == math.inf


def test_cyclic_rates_are_those_of_torch_after_the_warm_up() -> None:
    study = Study("", 2, 80, 4, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu", inner_schedule="cyclic")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CyclicLR(
        optimizer, 1e-4, 1e-3, step_size_up=4, mode="triangular2", cycle_momentum=False
    )
    for step in range(1, 81):
        optimizer.step()
        theirs.step()
        if step > 4:
            rate = optimizer.param_groups[0]["lr"]
            assert inner_rate(study, step) == pytest.approx(rate, abs=1e-12), step
    assert inner_rate(study, 2) == 5e-4


_STUDY = Study("", 2, 8, 4, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu")


def test_a_new_field_of_studies_loses_no_kept_run(tmp_path: Path) -> None:
    task, kept = Task("co2", 0), {}
    _, _, source = json.loads(identity(_STUDY, task, run_task))
    for later in ("shards", "inner_schedule"):
        before = {key: value for key, value in asdict(_STUDY).items() if key != later}
        of = {"study": before, "key": task.key, "source": source}
        entry = {"format": FORMAT, **of, "result": {"val_loss": 1.0}}
        (tmp_path / "kept").write_text(json.dumps(entry) + "\n")
        kept = read_kept(tmp_path / "kept")
        assert identity(_STUDY, task, run_task) in kept
    cyclic = replace(_STUDY, inner_schedule="cyclic")
    assert identity(cyclic, task, run_task) not in kept
    assert identity(_STUDY, Task("co2", 1), run_task) not in kept


def write_summary(directory: Path, digest: str) -> None:
    """Write what a run looks at of a corpus with this checksum."""
    counts = {"num_documents": 1, "num_tokens": 1}
    skipped = dict.fromkeys(("num_hidden", "num_duplicates", "num_not_text", "num_empty"), 0)
    summary = BuildSummary(
        "", "built", ("x",), "byte", 257, 256, "uint16", 0.05, SplitSummary(**counts),
        SplitSummary(**counts), 3.0, SkippedFiles(**skipped), "", digest,
    )  # fmt: skip
    fields = {"format": "dsx-dataset", "format_version": 1, **asdict(summary)}
    del fields["path"], fields["status"]
    (directory / "dataset.json").write_text(json.dumps(fields))
    (directory / "train.bin").touch()


def test_what_a_run_comes_from_is_in_what_it_is_kept_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summary(tmp_path, "a" * 32)
    study, task = replace(_STUDY, data=str(tmp_path)), Task("dilocox", 0)
    names = {identity(study, task, run_task)}

    def is_another() -> bool:
        name = identity(study, task, run_task)
        is_new = name not in names
        names.add(name)
        return is_new

    assert not is_another()
    assert json.loads(identity(study, task, run_task))[2]["corpus"] == "a" * 32
    monkeypatch.setattr(pool.dsx, "__version__", "9.9.9")
    assert is_another()

    def train_otherwise(study: Study, task: Task) -> dict[str, float]:
        return {}

    names.add(identity(study, task, train_otherwise))
    assert len(names) == 3
    # a default of the preset, which neither the study nor the task say
    changed = dsx.preset("dilocox", 2, compression={"dense_rounds": 7})

    def another_default(name: str, num_clusters: int) -> dsx.Method:
        return changed

    monkeypatch.setattr(schema, "preset_method", another_default)
    assert is_another()
    write_summary(tmp_path, "b" * 32)  # another corpus at the same place
    assert is_another()


def test_choices_go_before_those_of_a_study_key_by_key() -> None:
    axes = merge({"schedule": {"interval": 5, "gamma": 1}}, {"schedule": {"interval": 7}})
    assert axes == {"schedule": {"interval": 7, "gamma": 1}}
    axes = merge({"delay": {"type": "eager", "alpha": 1}}, {"delay": {"type": "blocking"}})
    assert axes == {"delay": {"type": "blocking"}}
    study = Study("", 2, 8, 4, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu")
    task = Task("diloco+int4", 0, choices={"schedule": {"interval": 2}})
    assert overrides(study, task)["schedule"] == {"interval": 2}
    assert overrides(study, task)["compression"] == {"type": "quantized", "wire": "int4"}
    assert task.key != Task("diloco+int4", 0).key


@pytest.mark.ci
def test_throughputs_of_dilocox_at_the_papers_scale(tmp_path: Path) -> None:
    out = tmp_path / "fig4.json"
    command = ["bench", "paper", "dilocox-fig4", "--short", "--json", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = json.loads(out.read_text())
    assert [verdict["status"] for verdict in found["verdicts"]] == [HOLDS, HOLDS]
    for row in found["rows"]:
        for figure, published in row["published"].items():
            assert row["samples"][figure] == [pytest.approx(published, rel=0.35)], row["label"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("paper"))


@pytest.mark.ci
def test_a_table_of_trainings(data: Path, tmp_path: Path) -> None:
    study = Study("", 2, 16, 4, 2, 16, 2, 16, 2, 3e-3, 2, 8, "cpu")
    measure = Loss(study, study, (1.0, 1.0), (0, 1), (0, 1), grid=((1.0, 0.0), (1e-3, 0.0)),
                   target="common")  # fmt: skip
    rows = (
        Row("AllReduce", BASELINE),
        Row("tuned", "diloco"),
        Row("as the paper has it", "diloco", {"outer_optimizer": {"lr": 0.5, "momentum": 0.5}}),
        Row("less often", "local_sgd+int8", study={"interval": 8}),
    )
    run = Run(data, False, 1, tmp_path / "table.runs.jsonl")
    assert measure.minutes(rows, run) == 2.0  # one at a time
    samples = measure.measure(rows, run)
    assert measure.minutes(rows, run) == 0  # finished runs are kept
    for label, figures in samples.items():
        assert len(figures["val_loss"]) == 2, label
        assert figures["perplexity"] == [perplexity(loss) for loss in figures["val_loss"]]
    assert samples["AllReduce"]["divergence"] == samples["AllReduce"]["gap_percent"] == [0, 0]
    assert samples["less often"]["syncs"] == [2, 2]
    assert all(0 < d < 0.5 for d in samples["tuned"]["divergence"])
    assert samples["tuned"]["bytes_per_cluster"] > samples["less often"]["bytes_per_cluster"]
    assert all(0 < s <= 16 for f in samples.values() for s in f["steps_to_target"])
    kept = (tmp_path / "table.runs.jsonl").read_text().splitlines()
    assert len(kept) == 2 * 4 + 1  # the grid's better point is the row's first seed, too
    corpora = {json.loads(line)["source"]["corpus"] for line in kept}
    assert corpora == {read_summary(data).content_digest}
    assert measure.measure(rows, run) == samples
    # an outer rate of a thousandth learns nothing: it was not chosen
    tuned = [json.loads(line)["result"] for line in kept if '"lr": 0.001' in line]
    assert len(tuned) == 1 and tuned[0]["val_loss"] > samples["tuned"]["val_loss"][0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_papers_table_of_trainings_in_its_short_form(data: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "fig3b.json", TABLES["dilocox-fig3b"]
    command = ["bench", "paper", table.name, "--short", "--data", str(data), "--json", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [row["label"] for row in found["rows"]] == [row.label for row in table.rows]
    for row in found["rows"]:
        assert row["label"] in done.output
        for column in table.columns:
            (value,) = row["samples"][column.figure]  # null is what is not finite
            assert value is not None and math.isfinite(value), (row["label"], column.figure)
        assert 0 < row["samples"]["val_loss"][0] < math.log(257)
    assert [v["claim"] for v in found["verdicts"]] == ["AllReduce < DiLoCoX < CocktailSGD"]
    for verdict in found["verdicts"]:
        assert verdict["status"] in (HOLDS, DIFFERS, NOISE) and verdict["says"] in done.output


def test_scaling_keeps_the_line_and_predicts_what_is_not_measured() -> None:
    lines = Lines(12.0, "1,32,16,1", (1.0, 1.0), blocks=2)
    scaling = Scaling(lines, (2,), (2,), (4, 16))
    # a ring sends 1, 1.5 and 1.875 sizes of the model: the same line takes as much longer
    assert [scaling.ratio_at(n) for n in (2, 4, 16)] == pytest.approx([6.4, 9.6, 12.0])
    often, seldom = (Row("", "co2", {"schedule": {"interval": n}}) for n in (10, 40))
    assert scaling.predict(Row("", BASELINE), 16) == pytest.approx(1 / 13, rel=0.01)
    assert scaling.predict(often, 16) == pytest.approx(10 / 12, rel=0.03)
    assert scaling.predict(often, 4) == pytest.approx(1.0)
    assert scaling.predict(seldom, 16) == pytest.approx(1.0)


def test_scaling_puts_speeds_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {2: [0.5, 0.4], 4: [0.25, 0.25]}
    asked: list[tuple[int, float]] = []

    def measured(lines: Lines, rows: Sequence[Row], run: Run) -> Samples:
        asked.append((lines.num_clusters, lines.ratio))
        return {row.label: {"utilization": shares[lines.num_clusters]} for row in rows}

    monkeypatch.setattr(Lines, "measure", measured)
    scaling = Scaling(Lines(12.0, "1,32,16,1", (1.0, 1.0), blocks=2), (2, 4), (2,), (4, 16))
    rows = (Row("one", "co2", {"schedule": {"interval": 10}}),)
    found = scaling.measure(rows, Run(tmp_path, False, 1, tmp_path / "kept"))["one"]
    assert asked == [(2, pytest.approx(6.4)), (4, pytest.approx(9.6))]
    assert (found["at_2"], found["at_4"]) == ([1.0, 0.8], [1.0, 1.0])
    alone = 16 * scaling.predict(rows[0], 16)
    assert found["at_16"] == [alone, alone]
    assert found["scalability"] == pytest.approx([alone * 2 / 16 / 1.0, alone * 2 / 16 / 0.8])
    asked.clear()
    short = scaling.measure(rows, Run(tmp_path, True, 1, tmp_path / "kept"))["one"]
    assert [clusters for clusters, _ in asked] == [2]
    assert short["at_4"] == pytest.approx([4.0, 4.0])


def test_overlaps_are_told_with_what_the_papers_formula_says() -> None:
    row = LineRow(
        14.4, 4.0, "", "co2", 12, 0, 96, True, 0.12, 0.1, 1.0, 1.0, 1.0, 0.0, 1, 1, 1, 1.0,
        block_overlaps=(0.8, 0.9), transfer_seconds=1.5,
    )  # fmt: skip
    figures = overlaps_of(row)
    assert figures["overlap"] == [0.8, 0.9]
    assert figures["computed_overlap"] == pytest.approx([0.8, 0.8])
    assert overlaps_of(replace(row, interval=48))["computed_overlap"] == [1.0, 1.0]
    assert overlaps_of(replace(row, block_overlaps=(), transfer_seconds=None)) == {}
