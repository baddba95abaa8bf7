"""The convergence study, at a size of seconds."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dsx
from dsx.bench.convergence.adaptive import Adaptive
from dsx.bench.convergence.growing import growing_intervals
from dsx.bench.convergence.inner import begin_step, end_step, make_optimizers, take_step
from dsx.bench.convergence.muon import Muon, orthogonalized
from dsx.bench.convergence.pool import identity
from dsx.bench.convergence.problems import PROBLEMS
from dsx.bench.convergence.runs import divergence, run_task
from dsx.bench.convergence.study import (
    choose,
    compare,
    read_owns,
    read_presets,
    read_search,
    require_runnable,
    tune_baseline,
)
from dsx.bench.convergence.tail import TailMean
from dsx.bench.convergence.task import (
    BASELINE,
    UNTUNED,
    Own,
    Study,
    Task,
    inner_rate,
    overrides,
    without_codec,
)
from dsx.bench.convergence.together import (
    share_moments,
    share_moments_coded,
    share_rest,
    shared_bytes,
)
from dsx.cli import app
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.data.shards import SHARDS
from dsx.method.changes import INTERVAL, RATE
from dsx.method.choices import PRESETS
from dsx.method.delay.shift import Shift
from dsx.method.outer_optimizer import Nesterov
from dsx.method.schedule.periodic import Streaming
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
    command += ["--json", str(out), "--inner-lr", "3e-3", "--rest-rate", "1", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_study_of_every_preset(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    grid = ["--rates", "0.5", "--momenta", "0,0.5", "--seeds", "0"]
    done = run(data, out, *grid)
    assert done.returncode == 0, done.stderr
    table = {row["preset"]: row for row in json.loads(out.read_text())}
    single = json.loads(out.with_suffix(".single.json").read_text())
    rows = {row["preset"]: row for row in single}
    assert {*rows} == {*table} == {*PRESETS, "data_parallel"}
    for name, row in rows.items():
        assert 0 < row["val_loss"] < 6
        assert name in done.stdout
        figures = table[name]
        assert figures["val_loss"] == row["val_loss"] and figures["gap_sd"] is None
        assert figures["tries"] == (1 if name in (*UNTUNED, "data_parallel") else 2)
        assert 0 <= figures["hidden_percent"] <= 100
    assert rows["data_parallel"]["gap_percent"] == 0
    assert rows["data_parallel"]["syncs"] == 16
    assert rows["local_sgd"]["syncs"] == rows["streaming_diloco"]["syncs"] == 4
    numel = rows["data_parallel"]["bytes_per_cluster"] // (2 * 3 * 16)  # * 4 bytes / 4 clusters
    assert abs(rows["local_sgd"]["bytes_per_cluster"] - 6 * numel * 4) < 1000  # and headers
    assert table["diloco"]["bytes_ratio"] == pytest.approx(2, rel=0.01)  # H 4, and fp32
    assert table["diloco"]["hidden_percent"] == 0 < table["eager"]["hidden_percent"]
    assert out.with_suffix(".png").stat().st_size > 10_000
    # finished runs are not run again, a half-written line is
    kept = out.with_suffix(".runs.jsonl")
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:-1]) + lines[-1][:40])
    assert run(data, out, *grid).returncode == 0
    again = {row["preset"]: row for row in json.loads(out.read_text())}
    assert again == table
    chosen = run(data, tmp_path / "long.json", "--settings", str(out), "--presets", "eager")
    assert chosen.returncode == 0, chosen.stderr
    assert len(json.loads((tmp_path / "long.single.json").read_text())) == 6  # of three seeds
    long = json.loads((tmp_path / "long.json").read_text())
    assert [row["seeds"] for row in long] == [[0, 1, 2]] * 2
    assert {row["preset"]: row["lr"] for row in long}["eager"] == table["eager"]["lr"]


@pytest.mark.ci
def test_clusters_with_a_kind_of_text_each_train_otherwise(data: Path) -> None:
    losses: list[float] = []
    for shards in SHARDS:
        study = Study(str(data), 2, 4, 2, 2, 16, 1, 16, 2, 3e-3, 1, 8, "cpu", shards)
        losses.append(run_task(study, Task("diloco", 0, 0.5, 0.0))["val_loss"])
    assert len(set(losses)) == 3


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(data: Path) -> None:
    study = Study(
        str(data), 2, 40, 4, 4, 16, 2, 16, 2, 1e-2, 1, 32, "cpu",
        inner="muon", rest_rate=3.0, final_rate=0.0,
    )  # fmt: skip
    model = PROBLEMS["causal"].make_model(study, 0)
    muon, adamw = make_optimizers(model, study)
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
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


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 or later has Muon")
def test_muon_steps_as_torch_does_up_to_its_bf16() -> None:
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 24), (24, 8), (8, 8)]
    starts = [torch.randn(shape) for shape in shapes]
    own, theirs = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    optimizers = [
        Muon(own, 0.02),
        torch.optim.Muon(theirs, 0.02, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(5):
        for mine, its in zip(own, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            its.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for start, mine, its in zip(starts, own, theirs, strict=True):
        assert (mine - its).norm() < 0.02 * (its - start).norm()


def test_orthogonalized_matrices_keep_their_directions_at_singular_values_near_one() -> None:
    matrices = torch.randn(3, 6, 20, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrices)
    assert ((torch.linalg.svdvals(found) - 1).abs() < 0.35).all()
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert (left.mT @ found @ right.mT).sub(torch.eye(6)).abs().max() < 0.35


@pytest.mark.slow
def test_compiled_models_train_alike(data: Path) -> None:
    study = Study(str(data), 2, 8, 4, 2, 16, 1, 16, 2, 1e-2, 1, 32, "cpu")
    for preset in (BASELINE, "streaming_diloco"):
        plain, compiled = (
            run_task(replace(study, compiled=c), Task(preset, 0))["val_loss"] for c in (False, True)
        )
        assert compiled == pytest.approx(plain, rel=1e-4)


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


@pytest.mark.slow
def test_sizes_are_trained_at_the_rates_of_the_first(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "sizes.json"
    options = "--sizes 1x16x2,2x16x2 --presets diloco --rates 0.5,1 --momenta 0 --seeds 0,1"
    done = run(data, out, *options.split(), "--qk-norm", "--z-loss", "1e-4", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.with_suffix(".single.json").read_text())
    table = json.loads(out.read_text())
    assert [row["size"] for row in table] == ["1x16x2"] * 2 + ["2x16x2"] * 2
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
    # two of the grid, then each seed at two sizes, of which one has been run, and data parallel
    # of two more lengths
    lines = [json.loads(line) for line in out.with_suffix(".runs.jsonl").read_text().splitlines()]
    assert len(lines) == 2 + 8 - 1 + 8
    assert all(line["study"]["qk_norm"] and line["study"]["z_loss"] == 1e-4 for line in lines)


def test_a_variant_goes_with_a_codec_and_any_tuned_preset() -> None:
    study = Study("", 4, 32, 16, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu")
    axes = overrides(study, Task("dilocox+int4+shift", 0, 0.5, 0.0))
    method = dsx.preset("dilocox", 4, **axes)
    assert isinstance(method.delay, Shift) and method.delay.outer_steps == 1
    assert isinstance(method.compression, Quantized)
    assert method.compression.wire == "int4" and method.schedule.interval == 16
    axes = overrides(study, Task("co2+serial", 0, 0.5, 0.5))
    method = dsx.preset("co2", 4, **axes)
    assert (method.delay.steps, method.fragments.num_fragments) == (4, 4)
    assert isinstance(method.schedule, Streaming)
    axes = overrides(study, Task("dilocox+bf16_momentum+int8_residual", 0, 0.5, 0.9))
    method = dsx.preset("dilocox", 4, **axes)
    assert method.outer_optimizer == Nesterov(0.5, 0.9, state_dtype="bf16")
    assert isinstance(method.compression, LowRank) and method.compression.dense_rounds == 5
    assert method.compression.error_feedback == "int8"
    assert without_codec("dilocox+bf16_momentum+int8_residual") == "dilocox"
    for wrong in (
        "dilocox+bf16_residual+int8_residual",
        "eager+int4+int8",
        "eager+shift+fast",
        "eager+shift+shift",
        "snoo+shift",
        "+shift",
    ):
        with pytest.raises(ValueError, match="is not PRESET or PRESET"):
            read_presets(wrong)


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("diloco+shift", "is none; try diloco_delayed.shift, or diloco.serial"),
        ("streaming_diloco+shift", "is none; try"),
        ("dilocox+shift", "cannot run: .*low_rank"),
        ("cocktail_sgd+serial", "cannot run"),
        ("dreamddp+serial", "cannot run"),
    ],
)
def test_a_variant_that_cannot_run_is_refused_before_anything_runs(
    preset: str, reason: str
) -> None:
    study = Study("", 4, 32, 16, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu")
    search = read_search(f"diloco,snoo,eager+shift,{preset}", "0.5", "0", "0", None, None, None)
    with pytest.raises(ValueError, match=reason):
        require_runnable(study, search)


def test_every_preset_can_run_and_rates_are_as_many_as_data_parallels() -> None:
    study = Study("", 4, 32, 16, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu")
    search = read_search(None, "0.25,0.5,1", "0,0.5", "0", None, None, None)
    require_runnable(study, search)
    assert search.tries(BASELINE) == search.tries("diloco") == 6


def test_settings_bring_their_inner_rates_and_have_to_have_every_preset(tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    row = {"lr": 0.7, "momentum": 0.5, "inner_lr": 0.02, "rest_rate": 2.0, "tries": 6}
    file.write_text(json.dumps([{**row, "preset": n} for n in (BASELINE, "diloco")]))
    search = read_search("diloco,diloco+int4", "1", "0", "0", file, None, None)
    assert (search.inner_lrs, search.rest_rates) == ([0.02], [2.0])
    assert [search.tries(name) for name in (BASELINE, "diloco+int4")] == [1, 6]
    said = read_search("diloco", "1", "0", "0", file, "0.01,0.03", "1")
    assert (said.inner_lrs, said.tries(BASELINE)) == ([0.01, 0.03], 2)
    with pytest.raises(ValueError, match="has no row of co2, eager; it has data_parallel, diloco"):
        read_search("eager,diloco,co2+int4", "1", "0", "0", file, None, None)


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
    assert "'eager+zip' is not PRESET or PRESET+CODEC or PRESET+VARIANT; presets: local_sgd" in said
    said = refused(tmp_path, "--shards", "sorted")
    assert "--shards='sorted' is not known; allowed: 'iid', 'contiguous', 'skewed'" in said
    said = refused(tmp_path, "--seeds", "0,one")
    assert "--seeds '0,one' must be numbers with commas between" in said


@pytest.mark.ci
def test_data_parallel_is_tuned_on_both_rates_and_its_best_is_for_all(
    data: Path, tmp_path: Path
) -> None:
    study = Study(str(data), 2, 8, 4, 2, 16, 1, 16, 2, 0.0, 2, 16, "cpu")
    search = read_search("diloco,snoo", "0.5,1", "0.5", "0,1", None, "1e-9,3e-3", "1e-9,1")
    tuned = tune_baseline(study, search, 1, tmp_path / "kept.jsonl")
    assert (tuned.inner_lr, tuned.rest_rate) == (3e-3, 1.0)
    assert [search.tries(name) for name in (BASELINE, "diloco", "dreamddp")] == [4, 2, 1]
    kept = len((tmp_path / "kept.jsonl").read_text().splitlines())
    compare(study, search, 1, tmp_path / "kept.json", None, None)
    assert len((tmp_path / "kept.runs.jsonl").read_text().splitlines()) > kept == 4
    rows = {row["preset"]: row for row in json.loads((tmp_path / "kept.json").read_text())}
    assert {row["inner_lr"] for row in rows.values()} == {3e-3}
    assert rows["snoo"]["bytes_ratio"] == 1 and rows["snoo"]["hidden_percent"] == 0
    assert rows["snoo"]["val_loss"] != rows["data_parallel"]["val_loss"]


def test_own_inner_settings_are_multiples_of_data_parallels(tmp_path: Path) -> None:
    study = Study("", 2, 8, 4, 1, 8, 2, 16, 2, 0.01, 1, 1, "cpu", rest_rate=2.0)
    own = Own(lr=1.5, rest=0.5, decay=0.25)
    applied = own.applied(study)
    assert (applied.inner_lr, applied.rest_rate) == (pytest.approx(0.015), 1.0)
    assert applied.weight_decay == pytest.approx(0.025)
    assert read_owns("1,1.5", "0.5", "1,0") == [
        Own(1.0, 0.5, 1.0), Own(1.0, 0.5, 0.0), Own(1.5, 0.5, 1.0), Own(1.5, 0.5, 0.0),
    ]  # fmt: skip
    assert Task("eager", 0).key == "eager/0/None/None" != Task("eager", 0, own=own).key
    file = tmp_path / "earlier.json"
    row = {"lr": 0.7, "momentum": 0.5, "tries": 12, "own": asdict(own)}
    file.write_text(json.dumps([{**row, "preset": n} for n in (BASELINE, "diloco")]))
    search = read_search(
        "diloco+embeddings", "1", "0", "0", file, "0.01", "1", read_owns("1,2", "1", "1")
    )
    assert search.tries("diloco") == 12
    chosen = choose(study, search, 1, tmp_path / "kept.jsonl")["diloco+embeddings"]
    assert (chosen.lr, chosen.own) == (0.7, own)
    with pytest.raises(ValueError, match="--own-decay 'x' must be numbers with commas"):
        read_owns("1", "1", "x")


@pytest.mark.ci
def test_own_settings_are_chosen_from_beside_outer_ones(data: Path, tmp_path: Path) -> None:
    study = Study(str(data), 2, 8, 4, 2, 16, 1, 16, 2, 3e-3, 2, 16, "cpu")
    owns = read_owns("1e-6,1", "1", "1")
    search = read_search("dreamddp,diloco", "0.5", "0.5", "0", None, "3e-3", "1", owns)
    assert [search.tries(name) for name in (BASELINE, "diloco", "dreamddp")] == [1, 2, 2]
    chosen = choose(study, search, 1, tmp_path / "kept.jsonl")
    assert {task.own for task in chosen.values()} == {Own()}
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 4


def test_what_is_shared_beside_a_method_is_the_mean_and_is_counted(data: Path) -> None:
    study = Study(str(data), 4, 8, 4, 2, 16, 2, 16, 2, 1e-2, 1, 8, "cpu", inner="muon")
    model = PROBLEMS["causal"].make_model(study, 0)
    models = [copy.deepcopy(model) for _ in range(3)]
    optimizers = [make_optimizers(m, study) for m in models]
    torch.manual_seed(0)
    for own, its in zip(models, optimizers, strict=True):
        tokens = torch.randint(0, 256, (2, 16))
        begin_step(own, its, (tokens, tokens))
    before = [m.embedding.weight.grad.clone() for m in models]  # pyright: ignore
    matrices = [m.layers[0].attention.query.weight.grad.clone() for m in models]  # pyright: ignore
    numel = sum(p.numel() for p in optimizers[0][-1].param_groups[0]["params"])
    assert share_rest(optimizers) == numel
    for own, matrix in zip(models, matrices, strict=True):
        torch.testing.assert_close(own.embedding.weight.grad, torch.stack(before).mean(0))
        assert torch.equal(own.layers[0].attention.query.weight.grad, matrix)
    for own, its in zip(models, optimizers, strict=True):
        end_step(own, its, 0.01)
    kept = [its[0].state[own.layers[0].attention.query.weight]["momentum_buffer"].clone()
            for own, its in zip(models, optimizers, strict=True)]  # fmt: skip
    total = sum(p.numel() for p in model.parameters())
    assert share_moments(optimizers) == total + numel  # Muon keeps one, AdamW two
    for own, its in zip(models, optimizers, strict=True):
        buffer = its[0].state[own.layers[0].attention.query.weight]["momentum_buffer"]
        torch.testing.assert_close(buffer, torch.stack(kept).mean(0))
        assert {float(its[1].state[p]["step"]) for p in its[1].state} == {1.0}
    assert shared_bytes(100, 4) == 2 * 2 * 3 * 100 // 4


@pytest.mark.ci
def test_variants_that_are_together_train_otherwise_and_pay_for_it(data: Path) -> None:
    study = Study(str(data), 2, 8, 4, 2, 16, 1, 16, 2, 1e-2, 1, 8, "cpu", inner="muon")
    runs = [
        run_task(study, Task(f"diloco{v}", 0, 0.5, 0.5))
        for v in ("", "+embeddings", "+moments", "+begun")
    ]
    assert len({r["val_loss"] for r in runs}) == 4
    plain, embeddings, moments, begun = (r["bytes_per_cluster"] for r in runs)
    assert begun - plain == shared_bytes(runs[0]["parameters"], 2)  # in one step, a twentieth
    rest = 2 * 257 * 16 + 3 * 16
    assert embeddings - plain == shared_bytes(8 * rest, 2)
    assert moments - plain == shared_bytes(2 * (runs[0]["parameters"] + rest), 2)
    assert len({r["average_bytes"] for r in runs}) == 1


def test_an_interval_grows_as_the_rate_falls_for_as_many_rounds() -> None:
    study = Study("", 4, 1600, 16, 1, 8, 2, 16, 2, 0.01, 1, 1, "cpu", final_rate=0.0)
    intervals = growing_intervals(study)
    assert len(intervals) == 1600 and set(intervals) <= set(range(8, 65))
    assert list(intervals) == sorted(intervals) and (intervals[0], intervals[-1]) == (8, 64)
    assert sum(1 / h for h in intervals) == pytest.approx(100, rel=0.02)


def test_a_run_whose_interval_grows_takes_other_rounds(data: Path) -> None:
    study = Study(str(data), 2, 64, 8, 2, 16, 1, 16, 2, 1e-2, 1, 8, "cpu", final_rate=0.0)
    runs = [run_task(study, Task(f"local_sgd{v}", 0)) for v in ("", "+growing")]
    assert runs[0]["syncs"] == 8
    assert 5 <= runs[1]["syncs"] <= 11 and runs[1]["val_loss"] != runs[0]["val_loss"]


def test_a_tail_is_the_mean_of_the_last_periods_models() -> None:
    study = Study("", 2, 82, 2, 1, 8, 2, 16, 2, 0.01, 1, 1, "cpu")  # from step 78 on
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    tail = TailMean(study)
    for step in range(1, 83):
        for model, value in zip(models, (step, 3.0 * step), strict=True):
            torch.nn.init.constant_(model.weight, value)
        tail.note(step, models)
    assert tail.model(models[0]).weight.item() == pytest.approx(2 * (78 + 80 + 82) / 3)
    assert models[0].weight.item() == 82


def test_few_bits_go_with_what_keeps_its_own_residual() -> None:
    study = Study("", 4, 32, 8, 1, 8, 2, 16, 2, 1e-3, 1, 1, "cpu")
    require_runnable(
        study,
        read_search(
            "recommended+1bit,recommended+3bit,diloco+2bit", "0.7", "0.5", "0", None, None, None
        ),
    )
    method = dsx.preset("recommended", 4, **overrides(study, Task("recommended+1bit", 0)))
    assert isinstance(method.compression, Quantized) and isinstance(method.delay, Shift)
    assert (method.compression.wire, method.compression.mean_wire) == ("1bit", "1bit")
    assert (method.schedule.interval, method.delay.steps) == (8, 2)
    with pytest.raises(ValueError, match="cannot run: .*error_feedback"):
        require_runnable(study, read_search("recommended+1bit_ef", "1", "0", "0", None, None, None))


def test_first_moments_come_together_in_few_bits(data: Path) -> None:
    study = Study(str(data), 3, 4, 2, 1, 8, 1, 64, 2, 1e-2, 1, 1, "cpu", inner="muon")
    model = PROBLEMS["causal"].make_model(study, 0)
    models = [copy.deepcopy(model) for _ in range(3)]
    optimizers = [make_optimizers(m, study) for m in models]
    torch.manual_seed(0)
    for own in optimizers:
        for each in own:
            for group in each.param_groups:
                for p in group["params"]:
                    p.grad = torch.randn_like(p)
            each.step()
    weight = [m.layers[0].attention.query.weight for m in models]  # pyright: ignore

    def kept() -> list[torch.Tensor]:
        muon = [
            own[0].state[w]["momentum_buffer"] for own, w in zip(optimizers, weight, strict=True)
        ]
        return [m.clone() for m in muon]

    before, counted = kept(), share_moments_coded(optimizers)
    after = kept()
    assert counted == pytest.approx(
        2.25 / 16 * sum(p.numel() for p in model.parameters()), rel=0.02
    )
    apart = [float((a - b).norm()) for a, b in ((before[0], before[1]), (after[0], after[1]))]
    assert apart[1] < 0.6 * apart[0]  # what codes leave out stays apart
    moved = torch.stack(after).mean(0) - torch.stack(before).mean(0)
    assert float(moved.norm()) < 0.5 * float(torch.stack(before).mean(0).norm())
    for own, m in zip(optimizers, models, strict=True):
        state = own[1].state[m.embedding.weight]  # pyright: ignore
        assert torch.allclose(state["exp_avg_sq"], 0.05 * m.embedding.weight.grad**2)  # pyright: ignore


def test_outer_settings_follow_what_the_guard_sees_within_bounds() -> None:
    adaptive = Adaptive(("gain", "tested"), 0.7, 16)
    assert adaptive.changed() == {RATE: 0.7, INTERVAL: 16}
    adaptive.note({"autocorrelation": 0.5, "cluster_cosine": 0.2})
    assert adaptive.changed() == {RATE: 0.7 * 1.01, INTERVAL: 16}
    adaptive.note({"cluster_cosine": 0.3})
    assert adaptive.interval == pytest.approx(16 * 1.05)
    for _ in range(200):
        adaptive.note({"autocorrelation": -1.0, "cluster_cosine": 0.0})
    assert adaptive.changed()[RATE] == pytest.approx(0.35)
    assert adaptive.changed()[INTERVAL] >= 8
    assert Adaptive((), 0.7, 16).changed() == {}
    few_bits = Adaptive(("tested",), 0.7, 16)
    for cosine in (0.3, 0.1, 0.0):
        few_bits.note({"autocorrelation": cosine})
    assert few_bits.interval == pytest.approx(16 / 1.05**2)


def test_runs_that_follow_the_guard_or_remember_for_longer_train_otherwise(data: Path) -> None:
    study = Study(
        str(data), 2, 32, 4, 2, 16, 1, 16, 2, 1e-2, 1, 8, "cpu", inner="muon", final_rate=0.0
    )
    variants = ("", "+gain", "+tested", "+slow", "+moments_2bit")
    runs = [run_task(study, Task(f"diloco{v}", 0, 0.5, 0.5)) for v in variants]
    assert len({r["val_loss"] for r in runs}) == len(runs)
    plain, gain, _, slow, moments = (r["bytes_per_cluster"] for r in runs)
    assert gain == plain and slow > moments > plain
