"""The convergence study, at a size of seconds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsx.bench.convergence.inner import make_optimizers, take_step
from dsx.bench.convergence.pool import identity
from dsx.bench.convergence.problems import PROBLEMS
from dsx.bench.convergence.runs import divergence, run_task
from dsx.bench.convergence.task import BASELINE, Study, Task, inner_rate
from dsx.cli import app
from dsx.data.shards import SHARDS
from dsx.method.choices import PRESETS
from tests.bench.corpus import build_corpus
from tests.installed import needs

ROOT = Path(__file__).parents[2]
pytestmark = needs("megatron")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("convergence"))


def run(data: Path, out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    size = "--steps 16 --interval 4 --layers 2 --hidden 16 --heads 2 --sequence-length 16"
    command = [sys.executable, "-m", "dsx", "bench", "convergence", *size.split()]
    command += ["--data", str(data), "--validation-windows", "8", "--evaluations", "2"]
    command += ["--json", str(out), *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_study_of_every_preset(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    grid = ["--rates", "0.5", "--momenta", "0,0.5", "--seeds", "0"]
    done = run(data, out, *grid)
    assert done.returncode == 0, done.stderr
    rows = {row["preset"]: row for row in json.loads(out.read_text())}
    assert {*rows} == {*PRESETS, "data_parallel"}
    for name, row in rows.items():
        assert {"seed", "val_loss", "gap_percent", "bytes_per_cluster", "syncs", "settings"} <= set(
            row
        )
        assert 0 < row["val_loss"] < 6
        assert name in done.stdout
    assert rows["data_parallel"]["gap_percent"] == 0
    assert rows["data_parallel"]["syncs"] == 16
    assert rows["local_sgd"]["syncs"] == rows["streaming_diloco"]["syncs"] == 4
    numel = rows["data_parallel"]["bytes_per_cluster"] // (2 * 3 * 16)  # * 4 bytes / 4 clusters
    assert abs(rows["local_sgd"]["bytes_per_cluster"] - 6 * numel * 4) < 1000  # and headers
    assert out.with_suffix(".png").stat().st_size > 10_000
    # finished runs are not run again, a half-written line is
    kept = out.with_suffix(".runs.jsonl")
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:-1]) + lines[-1][:40])
    assert run(data, out, *grid).returncode == 0
    again = {row["preset"]: row for row in json.loads(out.read_text())}
    assert again["eager"]["val_loss"] == rows["eager"]["val_loss"]
    chosen = run(data, tmp_path / "long.json", "--settings", str(out), "--presets", "eager")
    assert chosen.returncode == 0, chosen.stderr
    assert len(json.loads((tmp_path / "long.json").read_text())) == 6  # two presets, three seeds


@pytest.mark.ci
def test_clusters_with_a_kind_of_text_each_train_otherwise(data: Path) -> None:
    losses: list[float] = []
    for shards in SHARDS:
        study = Study(str(data), 2, 4, 2, 2, 16, 1, 16, 2, 3e-3, 1, 8, "cpu", shards)
        losses.append(run_task(study, Task("diloco", 0, 0.5, 0.0))["val_loss"])
    assert len(set(losses)) == 3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 or later has Muon")
def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(data: Path) -> None:
    study = Study(
        str(data), 2, 40, 4, 4, 16, 2, 16, 2, 1e-2, 1, 32, "cpu",
        inner="muon", rest_rate=3.0, final_rate=0.0,
    )  # fmt: skip
    model = PROBLEMS["causal"].make_model(study, 0)
    muon, adamw = make_optimizers(model, study)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert len(muon.param_groups[0]["params"]) == 2 * 7
    names = {id(p): name for name, p in model.named_parameters()}
    rest = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert {"embedding.weight", "head.weight"} < rest and not any("query" in n for n in rest)
    for rate in (0.02, 0.0):
        tokens = torch.randint(0, 256, (2, 16))
        take_step(model, [muon, adamw], (tokens, tokens), rate)
        assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (rate, 3 * rate)
    assert inner_rate(study, 40) == 0.0
    for preset in (BASELINE, "recommended"):
        assert run_task(study, Task(preset, 0))["val_loss"] < math.log(257) - 1.0, preset


def test_divergence_is_the_mean_distance_to_the_average_over_its_norm() -> None:
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    for model, weights in zip(models, ([[4.0, 0.0]], [[0.0, 2.0]]), strict=True):
        model.weight.data = torch.tensor(weights)
    assert divergence(models) == pytest.approx(1.0)  # (2, 1), and (2, -1) from each
    assert divergence([models[0], models[0]]) == 0


@pytest.mark.ci
@pytest.mark.parametrize(("problem", "outcomes"), [("masked", 257), ("images", 10)])
def test_other_problems_are_learned_by_presets_and_baseline(
    data: Path, problem: str, outcomes: int
) -> None:
    study = Study(
        str(data), 2, 60, 5, 8, 16, 3, 16, 2, 1e-2, 2, 64, "cpu", problem=problem
    )  # fmt: skip
    for preset in (BASELINE, "dreamddp", "local_sgd"):
        result = run_task(study, Task(preset, 0))
        assert result["val_loss"] < math.log(outcomes) - 0.7, preset
        assert result["accuracy"] > 3 / outcomes


def refused(data: Path, *args: str) -> str:
    command = ["bench", "convergence", "--data", str(data), *args]
    result = CliRunner().invoke(app, [*command, "--json", str(data / "results.json")])
    assert result.exit_code == 2
    return result.output


def test_a_missing_corpus_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    said = refused(tmp_path / "none")
    assert "make one with: dsx data build --from stdlib --out" in said


def test_what_is_no_problem_or_no_shape_of_one_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "--problem", "chess")
    assert "--problem 'chess' must be one of causal, masked, images" in said
    said = refused(tmp_path, "--inner", "lion")
    assert "--inner='lion' is not known; allowed: 'adamw', 'muon'" in said
    said = refused(tmp_path, "--inner", "muon", "--problem", "images")
    assert "use --inner adamw" in " ".join(said.split())
    with pytest.raises(ValueError, match="--layers 4 must be a multiple of 3.*try --layers 6"):
        study = Study("", 2, 1, 1, 1, 1, 4, 8, 1, 1.0, 1, 1, "cpu", problem="images")
        PROBLEMS["images"].make_model(study, 0)


@pytest.mark.ci
def test_sizes_are_trained_at_the_rates_of_the_first(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "sizes.json"
    options = "--sizes 1x16x2,2x16x2 --presets diloco --rates 0.5,1 --momenta 0 --seeds 0,1"
    done = run(data, out, *options.split(), "--qk-norm", "--z-loss", "1e-4", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    kinds = [(size, name) for size in ("1x16x2", "2x16x2") for name in ("data_parallel", "diloco")]
    assert [(r["size"], r["preset"]) for r in rows] == [kind for kind in kinds for _ in range(2)]
    assert len({r["lr"] for r in rows if r["preset"] == "diloco"}) == 1
    layer = 4 * 16 * 16 + 3 * 16 * 64 + 2 * 16 + 2 * 8  # and norms of queries and keys
    sizes = sorted({r["parameters"] for r in rows})
    assert sizes == [2 * 257 * 16 + 16 + count * layer for count in (1, 2)]
    for row in rows:
        base = rows[4 * (row["size"] == "2x16x2") + row["seed"]]
        assert row["gap_percent"] == pytest.approx(100 * (row["val_loss"] / base["val_loss"] - 1))
    assert "2x16x2" in done.stdout and out.with_suffix(".png").stat().st_size > 5000
    # two of the grid, then each seed at two sizes, of which one has been run
    lines = [json.loads(line) for line in out.with_suffix(".runs.jsonl").read_text().splitlines()]
    assert len(lines) == 2 + 8 - 1
    assert all(line["study"]["qk_norm"] and line["study"]["z_loss"] == 1e-4 for line in lines)


def test_options_that_are_off_have_no_part_in_what_a_run_is_kept_under() -> None:
    study, task = Study("", 2, 8, 4, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu"), Task("eager", 0)
    name = identity(study, task, run_task)
    assert "qk_norm" not in name and "num_heads" in name
    assert identity(replace(study, qk_norm=True), task, run_task) != name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sizes 2x32", "must be LAYERSxWIDTHxHEADS with commas between"),
        ("--sizes 2x30x2,4x64x4", "each width a multiple of twice its heads"),
        ("--sizes 2x32x2,2x32x2", "must be two or more different sizes"),
        ("--sizes 2x32x2,4x64x4 --target-loss 2", "--target-loss 2 has no part in --sizes"),
    ],
)
def test_sizes_that_are_none_are_named(data: Path, options: str, message: str) -> None:
    assert message in refused(data, *options.split())


def test_what_is_no_preset_or_number_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "--presets", "diloco,eager+zip")
    assert "'eager+zip' is not PRESET or PRESET+CODEC; presets: local_sgd" in said
    said = refused(tmp_path, "--shards", "sorted")
    assert "--shards='sorted' is not known; allowed: 'iid', 'contiguous', 'skewed'" in said
    said = refused(tmp_path, "--seeds", "0,one")
    assert "--seeds '0,one' must be numbers with commas between" in said
