"""`dsx bench e2e`: what is run, how figures follow from records, and one short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsx.bench.e2e import Options, Row
from dsx.bench.e2e_job import Job, Shape, build_model
from dsx.bench.e2e_loop import Course, Walk, train
from dsx.bench.e2e_plan import Situation, plan_presets
from dsx.bench.e2e_run import Measured, RunFailed, Runner
from dsx.bench.e2e_show import TARGETS, as_json, draw, show
from dsx.bench.testbed import UNAVAILABLE, Traffic
from dsx.plan.link import Link
from dsx.presets import PRESETS
from dsx.types import ParameterShape

DSX = [sys.executable, "-c", "from dsx.cli import app; app()"]


def cluster(step_seconds: list[float], ceilings: list[float]) -> dict[str, Any]:
    ends = [sum(step_seconds[: i + 1]) for i in range(len(step_seconds))]
    return {
        "steps": [{"seconds": end} for end in ends],
        "ceilings": [[0.5 * ceiling, 1.5 * ceiling] for ceiling in ceilings],
        "bytes_sent": round(100 * ceilings[-1]),
        "wire_bytes": 110,
    }


def test_a_step_is_the_median_of_whole_periods_after_the_first() -> None:
    first, slow = [9.0, 9.0], [1.0, 5.0]
    steps = [*first, *[1.0, 2.0], *slow, *[1.0, 1.0], *[7.0]]  # the last one is no whole period
    measured = Measured([cluster(steps, [1.0]), cluster(steps, [3.6])])
    assert measured.step_seconds(2) == pytest.approx(1.5)
    assert measured.step_seconds(2, skipped=0) == pytest.approx((1.5 + 3.0) / 2)
    assert measured.sent() == (360, 110)  # of the one that sends most


def test_a_block_is_held_against_the_ceilings_around_it() -> None:
    first, second = [9.0, 9.0, 2.0, 3.0, 2.0, 1.0], [7.0, 7.0, 4.0, 4.0, 4.0, 4.0]  # 3 rounds each
    other = [1.0] * 12
    measured = Measured([cluster(first + second, [1.0, 2.0, 4.0]), cluster(other, [0.9, 0.9, 0.9])])
    one, two = measured.blocks(2)
    assert one.step_seconds == pytest.approx((2.0 + 1.0) / 2)
    assert one.ceiling_seconds == pytest.approx((1.5 + 0.9) / 2)
    assert two.step_seconds == pytest.approx((4.0 + 1.0) / 2)
    assert two.ceiling_seconds == pytest.approx((3.0 + 0.9) / 2)
    assert one.utilization == pytest.approx(1.2 / 1.5)


class TestTrain:
    """Steps come in blocks, ceilings between them, and pauses are in no step's seconds."""

    def run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_ceiling: bool
    ) -> tuple[Course, list[str]]:
        now, log = [0.0], []
        monkeypatch.setattr("dsx.bench.e2e_loop.time.perf_counter", lambda: now[0])
        monkeypatch.setattr("dsx.bench.e2e_loop.ClusterBatches", lambda *a, **k: repeat(None))
        monkeypatch.setattr("dsx.bench.e2e_loop.TokenWindows", lambda *a: None)
        monkeypatch.setattr("dsx.bench.e2e_loop.read_line", lambda: Traffic(0, 0, 0, 0))

        def steps_of(name: str, seconds: float) -> Walk:
            def take_step(windows: Any) -> float:
                log.append(name)
                now[0] += seconds
                return 0.0

            return Walk(job, 0, take_step)

        def settle() -> None:
            log.append("settle")
            now[0] += 100.0

        job = Job("dsx", {}, Shape(), 6, 2, 2, "data", str(tmp_path), 5.0, ceiling_steps=1)
        alone = steps_of("alone", 1.0) if with_ceiling else None
        return train(job, steps_of("step", 2.0), alone, settle), log

    def test_blocks_and_ceilings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        course, log = self.run(monkeypatch, tmp_path, with_ceiling=True)
        assert [step["seconds"] for step in course.steps] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
        assert course.ceilings == [[1.0]] * 4
        pause = ["settle", *["alone"] * 6]  # five to warm up
        assert log == [*(pause + ["step"] * 2) * 3, *pause]

    def test_without_a_ceiling(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        course, log = self.run(monkeypatch, tmp_path, with_ceiling=False)
        assert (log, course.ceilings) == (["step"] * 6, [])
        assert course.steps[-1]["seconds"] == 12.0


def situation(ratio: float) -> Situation:
    named = build_model(Shape(), 0).named_parameters()
    parameters = [ParameterShape(name, tuple(p.shape)) for name, p in named]
    sent = 4 * sum(p.numel() for p in build_model(Shape(), 0).parameters())
    return Situation(parameters, 0.1, Link(8 * sent / (ratio * 0.1), payload_share=1.0), 2)


@pytest.mark.parametrize("ratio", [32, 350])
def test_overlapped_presets_just_fit_and_blocking_ones_do_not(ratio: float) -> None:
    here = situation(ratio)
    plans = plan_presets(tuple(PRESETS), here, 1.15)
    assert {plan.interval for plan in plans} == {plans[0].interval}
    assert 1.1 * ratio < plans[0].interval < 1.3 * ratio
    for plan in plans:
        predicted = plan.predict(here)
        if plan.is_overlapped:
            assert predicted.utilization > 0.999, plan.name
        else:
            assert predicted.utilization < 0.6, plan.name
    crowded = replace(here, link=replace(here.link, bits_per_second=here.link.bits_per_second / 2))
    late = next(plan for plan in plans if plan.name == "eager").predict(crowded)
    assert late.utilization < 0.6  # so the line is no wider than it needs to be


def test_a_model_with_too_few_layers_is_refused_before_anything_runs() -> None:
    here = situation(32)
    few = replace(here, parameters=[p for p in here.parameters if "layers.3" not in p.name])
    message = r"dilocox does not go with this shape: fragments.num_fragments=4 exceeds"
    with pytest.raises(ValueError, match=message):
        plan_presets(("eager", "dilocox"), few, 1.15)


def row(method: str, **changed: Any) -> Row:
    values: dict[str, Any] = {
        "ratio": 32.0, "megabits_per_second": 3.0, "method": method, "interval": 40,
        "delay_steps": 0, "steps": 160, "is_overlapped": True, "step_seconds": 0.1,
        "ceiling_seconds": 0.099, "tokens_per_second": 40960.0, "utilization": 0.99,
        "predicted_utilization": 1.0, "exposed_seconds": 0.04, "wire_bytes": 1047,
        "payload_bytes": 1000, "planned_bytes": 1000, "validation_loss": 2.5,
    }  # fmt: skip
    return Row(**{**values, **changed})


def text_of(*rows: Row) -> str:
    console = Console(width=140, record=True, file=StringIO())
    show(rows, console)
    return console.export_text()


def test_what_misses_a_target_is_named_with_its_figure() -> None:
    good = text_of(row("dilocox"), row("eager"))
    assert good.count("met ") == len(TARGETS) and "MISS" not in good
    bad = text_of(
        row("dilocox", utilization=0.85),
        row("eager", wire_bytes=1070, payload_bytes=1001),
        row("co2", is_overlapped=False, utilization=0.5, predicted_utilization=0.5),
    )
    assert "MISS utilization of overlapped presets at least 97 %: dilocox 85.0%" in bad
    assert "MISS bytes on the wire at most 1.06 of the payload: eager 1.069" in bad
    assert "MISS payload equal to the planner's, to the byte: eager 1" in bad
    assert "MISS utilization within 5 % of the planner's: dilocox 15.0%" in bad


def test_rows_as_json_and_as_a_figure(tmp_path: Path) -> None:
    rows = [row("eager"), row("dilocox", ratio=350.0, planned_bytes=None)]
    assert [r["method"] for r in json.loads(json.dumps(as_json(rows)))] == ["eager", "dilocox"]
    draw(rows, tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").read_bytes().startswith(b"\x89PNG")


class TestWaits:
    """A run whose launcher has ended is given up at once, with its output."""

    @pytest.mark.parametrize("what", ["ready", "drained", "cluster"])
    def test_a_launcher_that_fails_or_leaves_nothing(self, tmp_path: Path, what: str) -> None:
        runner = Runner(None, [0, 1], 30.0)  # type: ignore[arg-type]
        for m in range(2):
            (tmp_path / f"cluster_{m}.log").write_text(f"output of {m}")
        (tmp_path / f"{what}_1").touch()  # it has done its part, and then died
        for status in ("0", "3"):
            gone = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
            gone.wait(20)
            alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            try:
                with pytest.raises(RunFailed, match="cluster 1 of .* has failed:\noutput of 1"):
                    runner._wait_for(what, tmp_path, [alive, gone])
            finally:
                alive.kill()
                alive.wait(20)

    def test_a_deadline_names_the_clusters(self, tmp_path: Path) -> None:
        runner = Runner(None, [0, 1], 0.2)  # type: ignore[arg-type]
        (tmp_path / "ready_0").touch()
        with pytest.raises(RunFailed, match=r"clusters \[1\] of .* are not ready within 0.2 s"):
            runner._wait_for("ready", tmp_path, [])


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job("dsx", {"a": 1}, Shape(2, 32, 16, 4), 10, 5, 2, "data", str(tmp_path / "job"), 5.0)
    assert Job.read(job.write()) == job


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ratios", "x"], "ratios='x' must be numbers"),
        (["--presets", "dilocx"], "presets='dilocx' is not known; allowed: local_sgd"),
        (["--shape", "4,48,64,8"], "HIDDEN a multiple of 32"),
        (["--margin", "0.5"], "margin=0.5 must be 1"),
        (["--clusters", "9"], "clusters=9 must be 2"),
        (["--json", "/no/dir/x"], "no directory /no/dir to write x to"),
        (["--data", "nowhere"], "nowhere is not a dataset; build one with: dsx data build"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from dsx.cli import app

    done = CliRunner().invoke(app, ["bench", "e2e", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_options_refuse_a_ratio_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"ratios=0 must be 1"):
        Options(Path("out"), Path("data"), ratios=(0.0,))


@pytest.mark.slow
def test_a_short_run_from_launchers_to_the_table(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    data, found = tmp_path / "data", tmp_path / "rows.json"
    subprocess.run([*DSX, "data", "build", "--from", "stdlib", "--out", str(data)], check=True)
    presets = ["eager", "diloco", "dilocox", "dreamddp"]
    shape = ["--shape", "4,32,32,8", "--rounds", "1", "--blocks", "2"]
    done = subprocess.run(
        [*DSX, "bench", "e2e", "--data", str(data), "--out", str(tmp_path / "runs"),
         "--ratios", "8", "--presets", ",".join(presets), *shape, "--json", str(found)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    rows = {r["method"]: r for r in json.loads(found.read_text())}
    assert list(rows) == ["no communication", "data_parallel", *presets]
    for name in ("eager", "diloco", "dilocox"):
        assert rows[name]["payload_bytes"] == rows[name]["planned_bytes"]
        assert 1.04 < rows[name]["wire_bytes"] / rows[name]["payload_bytes"] < 1.6
    assert rows["data_parallel"]["utilization"] < rows["diloco"]["utilization"] < 0.9
    assert rows["diloco"]["utilization"] < rows["eager"]["utilization"]
