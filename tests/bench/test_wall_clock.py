"""`dsx bench wall-clock`: what is run, how curves follow from records, and one short run of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from rich.console import Console
from safetensors.torch import save_file
from torch.nn import functional as F

from dsx.bench.e2e.job import Job, Shape
from dsx.bench.e2e.run import Measured
from dsx.bench.testbed import UNAVAILABLE, Traffic
from dsx.bench.wall_clock.bench import Bench, Report, best_rate, say_progress
from dsx.bench.wall_clock.inner import divide, make_optimizer
from dsx.bench.wall_clock.job import TrainingJob, build_gpt
from dsx.bench.wall_clock.plan import FEWEST_STEPS, Options, Plan, make_plan, snapshot_steps
from dsx.bench.wall_clock.score import Part, Point, mean_of, score
from dsx.bench.wall_clock.show import conclusions, continued, difference, figure_of, show
from dsx.data import TokenWindows
from dsx.outer.recovery import NonFiniteError
from tests.bench.corpus import build_corpus
from tests.installed import needs

DSX = [sys.executable, "-c", "from dsx.cli import app; app()"]
SMALL = Shape(1, 32, 16, 2)


def options(**changed: Any) -> Options:
    return replace(Options(Path("out"), Path("data")), **changed)


class TestPlan:
    def plan(self, step_seconds: float = 0.3, **changed: Any) -> Plan:
        return make_plan(options(**changed), step_seconds, 1_271_680, 11_000_000)

    def test_all_runs_fit_the_minutes(self) -> None:
        plan = self.plan()
        assert plan.steps % 16 == plan.try_steps % 16 == 0
        seconds = (2 * plan.steps + 8 * plan.try_steps) * plan.step_seconds + plan.slow_seconds
        assert 0.7 * 7200 < seconds < 0.9 * 7200  # the rest is for what a step has beside
        assert plan.tokens_per_step == 2 * 128 * 16
        assert plan.tokens_per_parameter == pytest.approx(plan.steps * 4096 / 1_271_680)
        assert plan.epochs == pytest.approx(plan.steps * 4096 / 11e6)

    def test_one_rate_needs_no_tries(self) -> None:
        assert self.plan(rates=(0.01,)).steps > 1.2 * self.plan().steps

    @pytest.mark.parametrize("minutes", [20, 120, 500])
    def test_short_runs_of_all_rates_fit_too(self, minutes: float) -> None:
        plan = self.plan(0.2, minutes=minutes, rates=tuple(0.001 * n for n in range(1, 11)))
        seconds = (2 * plan.steps + 20 * plan.try_steps) * plan.step_seconds + plan.slow_seconds
        assert seconds < 0.9 * 60 * minutes
        assert plan.try_steps == FEWEST_STEPS if minutes < 100 else plan.try_steps > FEWEST_STEPS

    def test_data_parallel_takes_some_steps_on_the_slow_line(self) -> None:
        plan = self.plan(minutes=60, ratio=390)
        assert plan.slow_seconds > 8 * (plan.transfer_seconds + plan.step_seconds) > 0.06 * 3600
        assert self.plan(ratio=10).slow_seconds == pytest.approx(0.06 * 7200)
        with pytest.raises(ValueError, match="on the slow line, where an all-reduce takes 300 s"):
            self.plan(minutes=30, ratio=1000)

    def test_no_line_is_so_slow(self) -> None:
        with pytest.raises(ValueError, match="megabits_per_second=3.*e-05 must be 0.01"):
            make_plan(options(ratio=1e4), 1.0, 10_000, 11_000_000)

    def test_the_line_is_that_of_the_ratio_or_what_is_asked_for(self) -> None:
        plan = self.plan()
        assert plan.ratio == pytest.approx(100)
        sent = 4 * plan.num_parameters  # by each of two clusters
        assert 1.04 < plan.transfer_seconds * plan.megabits_per_second / (8e-6 * sent) < 1.08
        given = self.plan(megabits_per_second=plan.megabits_per_second / 2)
        assert given.ratio == pytest.approx(200)
        four = self.plan(num_clusters=4)
        assert four.megabits_per_second == pytest.approx(1.5 * plan.megabits_per_second)

    def test_too_few_minutes_are_refused(self) -> None:
        with pytest.raises(ValueError, match=f"and {FEWEST_STEPS} are the fewest, .*; give more"):
            self.plan(minutes=4)

    @pytest.mark.parametrize("step_seconds, advice", [(0.3, None), (0.05, "larger"), (2, "small")])
    def test_a_run_should_suit_its_model(self, step_seconds: float, advice: str | None) -> None:
        said = self.plan(step_seconds).advice()
        assert advice in said if said is not None and advice is not None else said is advice


@pytest.mark.parametrize("steps", [64, 1600, 8192])
def test_points_are_dense_first_and_then_even(steps: int) -> None:
    chosen = snapshot_steps(steps)
    assert chosen == sorted(set(chosen)) and chosen[0] > 0 and chosen[-1] == steps * 15 // 16
    assert len(chosen) < 45
    assert all(after - before <= steps / 16 for before, after in zip(chosen, chosen[1:]))  # noqa: B905


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = training_job(tmp_path / "job", "data", rate=0.5, snapshot_steps=[1, 2], most_seconds=3.0)
    assert TrainingJob.read(job.write()) == job
    assert isinstance(job, Job)


class TestOptimizer:
    def test_matrices_of_layers_are_apart(self) -> None:
        model = build_gpt(SMALL, 0)
        matrices, rest = divide(model)
        assert len(matrices) == 7 and all(p.ndim == 2 for p in matrices)
        named = {id(p): name for name, p in model.named_parameters()}
        assert {named[id(p)] for p in rest} == {
            "embedding.weight", "head.weight", "norm.weight",
            "layers.0.attention_norm.weight", "layers.0.feed_forward_norm.weight",
        }  # fmt: skip
        (group,) = make_optimizer(model, "adamw", 0.25).param_groups
        assert group["lr"] == 0.25 and len(group["params"]) == 12

    @needs("deepspeed")
    def test_an_update_by_muon_is_as_large_as_one_of_adamw(self) -> None:
        model = build_gpt(Shape(1, 128, 16, 2), 0)
        optimizer = make_optimizer(model, "muon", 0.01)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with torch._dynamo.config.patch(disable=True):
            optimizer.step()
        for name, parameter in model.named_parameters():
            moved = (parameter.detach() - before[name]).square().mean().sqrt().item()
            if name.startswith("layers.") and parameter.ndim == 2:
                assert 0.1 < moved / 0.01 < 0.25, name  # AdamW's are taken to be 0.2 later on
            else:
                assert moved / 0.03 == pytest.approx(1.0, abs=0.11), name  # its first is a sign


def training_job(directory: Path, data: str, **changed: Any) -> TrainingJob:
    shape = SMALL
    job = TrainingJob("dsx", {}, shape, 4, 4, 2, data, str(directory), 5.0, 0.0)
    return replace(job, **changed)


def record(step_seconds: float, wire_bytes: int) -> dict[str, Any]:
    steps = [
        {
            "seconds": n * step_seconds, "wire_bytes": n * wire_bytes, "loss": 1.0,
            "forward_seconds": 0.25 * n, "cpu_seconds": 0.5 * n, "wait_seconds": 0.1 * n,
            "bytes_sent": 7 * n,
        }
        for n in range(1, 5)
    ]  # fmt: skip
    end = {"seconds": 5 * step_seconds, "wire_bytes": 5 * wire_bytes}
    return {
        "steps": steps, "end": {**end, "wait_seconds": 0.5, "bytes_sent": 35},
        "has_diverged": False, "snapshot_seconds": step_seconds / 8,
    }  # fmt: skip


def test_a_curve_is_of_the_mean_model_the_slowest_and_the_most_bytes(tmp_path: Path) -> None:
    data, runs = build_corpus(tmp_path), tmp_path / "run"
    job = training_job(runs, str(data), snapshot_steps=[2, 8], seed=5)
    job.write()
    one, other = (dict(build_gpt(SMALL, seed).state_dict()) for seed in (1, 2))
    for name, pair in (("2", (one, other)), ("end", (one, one))):
        for m in range(2):
            save_file(pair[m], runs / f"weights_{name}_{m}")
    part = score("recommended", job, Measured([record(1.0, 10), record(2.0, 5)]), 1.5)
    assert not list(runs.glob("weights_*"))
    assert [(p.step, p.seconds, p.wire_bytes) for p in part.curve] == [(2, 4.0, 20), (4, 10.0, 50)]
    held_out = TokenWindows(f"{data}/validation", SMALL.sequence_length)
    rows = torch.stack(list(held_out))  # type: ignore[arg-type]
    model = build_gpt(SMALL, 0).eval()
    for point, weights in zip(part.curve, (mean_of([one, other]), one), strict=True):
        model.load_state_dict(weights)
        logits = model(rows[:, :-1])
        expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
        assert point.loss == pytest.approx(expected, abs=1e-5)
    assert (part.step_seconds, part.forward_seconds, part.cpu_seconds) == (1.0, 0.25, 0.5)
    assert (part.wait_seconds, part.payload_bytes) == (0.5, 35)
    assert (part.snapshot_seconds, part.forward_deciles) == (0.25, (0.25, 0.25))
    assert Part.read(json.loads(json.dumps(part.as_json()))) == part


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps_has_no_deciles(tmp_path: Path, steps: int) -> None:
    job = training_job(tmp_path / "run", str(build_corpus(tmp_path)), mode="data_parallel")
    job.write()
    save_file(dict(build_gpt(SMALL, 1).state_dict()), tmp_path / "run/weights_end_0")
    whole = record(1.0, 10)
    short = {**whole, "steps": whole["steps"][:steps]}
    part = score("slow", job, Measured([short, short]), 1.5)
    assert (part.steps, part.forward_seconds, part.forward_deciles) == (steps, 0.25, None)
    assert Part.read(json.loads(json.dumps(part.as_json()))) == part


def test_a_run_that_has_diverged_has_no_loss(tmp_path: Path) -> None:
    job = training_job(tmp_path / "run", str(build_corpus(tmp_path)))
    job.write()
    found = {**record(1.0, 10), "has_diverged": True}
    part = score("recommended_1", job, Measured([found, found]), 1.5)
    written = json.dumps(part.as_json(), allow_nan=False)
    assert math.isnan(part.last.loss) and math.isnan(Part.read(json.loads(written)).last.loss)


@needs("deepspeed")
@pytest.mark.parametrize("has_diverged", [False, True])
def test_a_worker_writes_points_and_ends_where_the_model_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_diverged: bool
) -> None:
    from dsx.bench.wall_clock.worker import Training

    def finish() -> None:
        totals.bytes_sent = 8
        if has_diverged:
            raise NonFiniteError("of this cluster")

    for room in ("e2e.loop", "wall_clock.worker"):
        monkeypatch.setattr(f"dsx.bench.{room}.read_line", lambda: Traffic(9, 0, 0, 0))
    job = training_job(tmp_path / "run", str(build_corpus(tmp_path)), snapshot_steps=[2])
    job.write()
    totals = SimpleNamespace(wait_seconds=0.5, bytes_sent=3)
    inner: Any = SimpleNamespace(take_step=lambda _: 1.0, read=dict)
    inner.engine = SimpleNamespace(module=build_gpt(SMALL, 0))
    handle: Any = SimpleNamespace(totals=totals, finish=finish, averaged=nullcontext)
    handle.loop = SimpleNamespace(last_applied={})
    written = Training(job, 1, inner, handle).run()
    assert (len(written["steps"]), written["has_diverged"]) == (4, has_diverged)
    assert written["steps"][-1]["bytes_sent"] == 3 and written["end"]["bytes_sent"] == 8
    assert 0 < written["snapshot_seconds"] < written["end"]["seconds"]
    files = sorted(path.name for path in (tmp_path / "run").glob("weights_*"))
    assert files == (["weights_2_1"] if has_diverged else ["weights_2_1", "weights_end_1"])


def part(name: str, points: list[Point], **changed: Any) -> Part:
    mode = "dsx" if name.startswith("recommended") else "data_parallel"
    last = points[-1].step
    made = Part(
        name, mode, 0.01, 100, last, None, tuple(points), 1.0, 0.5, (0.4, 0.6), 0.8, 0.1, None, None
    )
    return replace(made, **changed)


def report(**changed: Any) -> Report:
    plan = make_plan(options(), 0.3, 1_271_680, 11_000_000)
    fast = part("fast", [Point(5, 5.0, 500, 4.0), Point(100, 100.0, 10_000, 2.0)])
    ours = part("recommended", [Point(5, 6.0, 0, 4.5), Point(100, 125.0, 50, 2.1)], **changed)
    slow = part("slow", [Point(5, 500.0, 500, 4.0), Point(10, 1000.0, 1000, 3.9)])
    tries = tuple(
        part(f"{name}_{rate}", [Point(10, 1.0, 1, 3.0 + abs(rate - 2))], rate=rate)
        for name in ("fast", "recommended")
        for rate in (1, 2, 3)
    )
    return Report(plan, tries, (fast, ours, slow))


class TestShow:
    def test_data_parallel_goes_on_at_its_pace_with_the_losses_of_the_fast_line(self) -> None:
        fast, _, slow = report().parts
        assert continued(fast, slow) == [Point(5, 500.0, 500, 4.0), Point(100, 1e4, 10_000, 2.0)]
        assert difference(fast, slow) == 0.0
        other = replace(slow, curve=(Point(5, 1.0, 1, 4.5), *slow.curve[1:]))
        assert difference(fast, other) == 0.5

    def test_what_is_said(self) -> None:
        said = conclusions(report())
        assert said[0].startswith("recommended ends +5.00 % from data parallel of the same 100")
        assert "1.25 times as long" in said[1] and "10 steps after 16.7 minutes" in said[1]
        assert "2.78 hours, 80 times as long as recommended" in said[1]
        assert "200 times fewer bytes on the wire than fp32 gradients do, 100" in said[2]
        assert len(said) == 3

    def test_what_may_be_wrong_is_said(self) -> None:
        busy = conclusions(report(forward_seconds=0.25))
        assert "took 2.00 times as long" in busy[3] and "not quiet" in busy[3]
        found = report()
        tries = tuple(t for t in found.tries if t.rate != 1)
        edges = conclusions(replace(found, tries=tries))[3:]
        assert [line.split(":")[0] for line in edges] == ["data parallel", "recommended"]
        slow = replace(found.parts[2], curve=(Point(5, 1.0, 1, 4.5), *found.parts[2].curve[1:]))
        apart = conclusions(replace(found, parts=(*found.parts[:2], slow)))
        assert "differ by 0.5" in apart[3]
        ours = replace(found.parts[1], curve=(Point(100, 125.0, 50, math.nan),))
        first = replace(found.tries[0], curve=(Point(10, 1.0, 1, math.nan),))
        parts = (found.parts[0], ours, found.parts[2])
        lost = conclusions(replace(found, parts=parts, tries=(first, *found.tries[1:])))
        assert lost[3:] == [
            "recommended, slow line: the loss is nan: it has diverged; try smaller --rates"
        ]
        slow = replace(found.parts[2], curve=(Point(5, 500.0, 500, math.nan),))
        assert difference(found.parts[0], slow) == math.inf

    def test_table_figure_and_json(self, tmp_path: Path) -> None:
        console = Console(width=150, record=True, file=StringIO())
        found = report(wait_seconds=3.0, payload_bytes=40)
        show(found, console)
        text = console.export_text()
        assert "fast_1" in text and "500 (400 - 600)" in text and "2.1000" in text
        assert "snapshots s" in text and "0.10" in text
        time, sent = figure_of(found).axes
        assert len(time.lines) == len(sent.lines) == 4
        assert [len(line.get_xdata()) for line in sent.lines] == [2, 1, 2, 1]  # 0 is on no log axis
        assert list(time.lines[3].get_xdata()) == [1e4]
        assert "recommended, slow line: 2.100 after 2.08 minutes" in time.lines[1].get_label()
        values = json.loads(json.dumps(found.as_json()))
        assert values["plan"]["ratio"] == pytest.approx(100)
        assert [p["name"] for p in values["parts"]] == ["fast", "recommended", "slow"]

    def test_the_best_rate_and_progress(self) -> None:
        tries = list(report().tries[:3])
        assert best_rate(tries) == 2
        diverged = [
            part(f"fast_{rate}", [Point(10, 1.0, 1, math.nan)], rate=rate) for rate in (7, 8)
        ]
        assert best_rate([*diverged, *tries]) == best_rate([*tries, *diverged]) == 2
        with pytest.raises(ValueError, match="fast_7, fast_8: every one has diverged; try small"):
            best_rate(diverged)
        told = {"step": 10.0, "seconds": 60.0, "loss": 2.5, "wire_bytes": 4e6}
        job = training_job(Path("x"), "data", steps=100)
        assert say_progress("fast", told, job) == (
            "  fast: step 10 of 100 after 1.0 min, training loss 2.500, 4 MB sent; 9.0 min left"
        )
        capped = say_progress("slow", told, replace(job, most_seconds=90.0))
        assert capped.endswith("0.5 min left")


def test_what_is_kept_is_not_run_again_and_another_run_is_refused(tmp_path: Path) -> None:
    data, told = build_corpus(tmp_path), list[str]()
    asked = options(directory=tmp_path / "out", data=data, shape=SMALL, minutes=30)

    class Steps:
        """Has the records of the steps that are timed first."""

        watch: Any = None

        def run(self, job: TrainingJob, line: Any, worker: str) -> Measured:
            assert (job.mode, line, worker) == ("ceiling", None, "dsx.bench.wall_clock.worker")
            steps = [{"seconds": 0.01 * n} for n in range(job.steps)]
            return Measured([{"steps": steps}] * 2)

    nobody: Any = None
    timed: Any = Steps()
    plan = Bench(asked, timed, told.append).plan()
    assert plan.step_seconds == pytest.approx(0.01)
    assert Bench(asked, nobody, told.append).plan() == plan
    done = part("fast", [Point(plan.steps, 9.0, 8, 2.5)])
    (tmp_path / "out/fast.json").write_text(json.dumps(done.as_json()))
    again = Bench(asked, nobody, told.append)
    assert again.part("fast", "data_parallel", 0.01, plan.steps, None) == done
    assert "validation loss 2.5000" in told[-1]
    other = replace(asked, ratio=50.0, rates=(0.1,))
    with pytest.raises(
        ValueError, match=r"other ratio \(100.0 there, 50.0 now\), rates \(.*; go on"
    ):
        Bench(other, nobody, told.append).plan()
    kept = json.loads((tmp_path / "out/plan.json").read_text())
    kept["asked"].update(dsx="0.0.1", cores=99)
    (tmp_path / "out/plan.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"with other dsx \(0.0.1 there, .*, cores \(99 there, \d"):
        Bench(asked, nobody, told.append).plan()


def test_a_preset_that_would_be_refused_is_so_before_anything_is_run(tmp_path: Path) -> None:
    asked = options(directory=tmp_path, data=build_corpus(tmp_path), shape=SMALL, interval=1)
    nobody: Any = None
    with pytest.raises(ValueError, match="schedule.interval=1 has none; use an interval of 2"):
        Bench(asked, nobody, print).plan()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rates", "x"], "rates='x' must be numbers"),
        (["--rates", "0.1,0.1"], "must be one or more, each once"),
        (["--inner", "sgd"], "inner='sgd' is not known; allowed: muon, adamw"),
        (["--shape", "4,48,64,8"], "HIDDEN a multiple of 32"),
        (["--ratio", "0"], "ratio=0 must be 1"),
        (["--interval", "0"], "interval=0 must be 1"),
        (["--minutes", "601"], "minutes=601 must be 1 to 600"),
        (["--plot", "/no/dir/x.png"], "--plot /no/dir/x.png: there is no such directory"),
        (["--data", "nowhere"], "nowhere is not a dataset; build one with: dsx data build"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from dsx.cli import app

    done = CliRunner().invoke(app, ["bench", "wall-clock", *arguments])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.slow
def test_three_short_runs_and_again_from_what_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    data, found = tmp_path / "data", tmp_path / "found.json"
    subprocess.run([*DSX, "data", "build", "--from", "stdlib", "--out", str(data)], check=True)
    command = [
        *DSX, "bench", "wall-clock", "--data", str(data), "--out", str(tmp_path / "runs"),
        "--minutes", "2.5", "--shape", "2,32,32,4", "--rates", "0.008", "--json", str(found),
        "--plot", str(tmp_path / "found.png"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    fast, ours, slow = (Part.read(p) for p in json.loads(found.read_text())["parts"])
    assert slow.steps < fast.steps == ours.steps
    assert difference(fast, slow) < 1e-3  # so where it goes on it is known
    assert ours.last.loss < 0.7 * ours.curve[0].loss
    assert ours.last.loss < 1.2 * fast.last.loss
    assert slow.last.seconds / slow.steps > 30 * ours.last.seconds / ours.steps
    assert ours.payload_bytes is not None and ours.payload_bytes < ours.last.wire_bytes
    assert fast.last.wire_bytes > 50 * ours.last.wire_bytes
    (tmp_path / "runs/slow.json").unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
    parts = json.loads(found.read_text())["parts"]
    assert [Part.read(p) for p in parts[:2]] == [fast, ours]
    assert parts[2] != slow.as_json()  # run anew
