"""`dsx bench e2e`: what is run, how figures follow from records, and one short run of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.bench.e2e.bench import Bench, Options
from dsx.bench.e2e.job import Job, Shape, build_model
from dsx.bench.e2e.loop import Recorded, TimedSteps, train
from dsx.bench.e2e.plan import Situation, plan_preset, plan_presets, planned_interval
from dsx.bench.e2e.run import Block, Measured, RunFailed, Runner
from dsx.bench.kinds import GLOO, KINDS
from dsx.bench.line import cores_for, shared_cores
from dsx.bench.testbed import UNAVAILABLE, Line, Traffic
from dsx.comm.links.trust import load_trust
from dsx.config.schema import load_config
from dsx.core.types import ParameterShape
from dsx.method.choices import PRESETS
from dsx.outer.transfer import NothingYet, Transfer
from dsx.plan.link import Link

DSX = [sys.executable, "-c", "from dsx.cli import app; app()"]


def cluster(step_seconds: list[float], ceilings: list[float]) -> dict[str, Any]:
    ends = [sum(step_seconds[: i + 1]) for i in range(len(step_seconds))]
    return {
        "steps": [{"seconds": end} for end in ends],
        "ceilings": [[0.5 * c, 0.5 * c, 2 * c] for c in ceilings],  # whose mean counts
        "bytes_sent": round(100 * ceilings[-1]),
        "wire_bytes": 110,
    }


def test_a_step_is_the_median_of_whole_periods_after_the_first() -> None:
    first, slow = [9.0, 9.0], [1.0, 5.0]
    steps = [*first, *[1.0, 2.0], *slow, *[1.0, 1.0], *[7.0]]  # the last one is no whole period
    measured = Measured([cluster(steps, [1.0]), cluster(steps, [3.6])])
    assert measured.step_seconds(2) == pytest.approx(1.5)
    assert measured.sent() == (360, 110)  # of the one that sends most


def test_a_block_is_held_against_the_ceilings_around_it() -> None:
    first, second = [9.0, 9.0, 2.0, 3.0, 2.0, 1.0], [7.0, 7.0, 4.0, 4.0, 4.0, 4.0]  # 3 rounds each
    other = [1.0] * 12
    measured = Measured([cluster(first + second, [1.0, 2.0, 4.0]), cluster(other, [0.9, 0.9, 0.9])])
    one, two = measured.blocks(2)
    assert one.step_seconds == pytest.approx((2.0 + 1.0) / 2)
    assert two.step_seconds == pytest.approx((4.0 + 1.0) / 2)
    # what counts are steps 2 to 6 of 6, whose middle is two thirds of the way from pause to pause
    assert one.ceiling_seconds == pytest.approx((1.0 + 2 / 3 + 0.9) / 2)
    assert two.ceiling_seconds == pytest.approx((2.0 + 4 / 3 + 0.9) / 2)
    assert one.utilization == pytest.approx(one.ceiling_seconds / 1.5)


def test_what_was_waited_is_that_of_the_rounds_that_count() -> None:
    waited = [3.0, 3.0, 3.5, 3.5, 4.0, 5.0]  # so far; the first round is left out
    first, second = cluster([1.0] * 6, [1.0] * 2), cluster([1.0] * 6, [1.0] * 2)
    for step, seconds in zip(first["steps"], waited, strict=True):
        step["wait_seconds"] = seconds
    for step in second["steps"]:
        step["wait_seconds"] = 0.0
    (one,) = Measured([first, second]).blocks(2)
    assert one.wait_seconds == pytest.approx((2.0 / 4 + 0.0) / 2)
    (unknown,) = Measured([cluster([1.0] * 6, [1.0] * 2)]).blocks(2)  # another library's
    assert math.isnan(unknown.wait_seconds)


def test_overlap_is_the_share_of_transfers_that_nobody_waited_for() -> None:
    record = cluster([1.0] * 6, [1.0] * 2)
    waited, under_way = [9, 9, 9, 10, 10, 11], [9, 9, 9, 13, 13, 17]  # so far; 2 and 8 count
    for step, one, other in zip(record["steps"], waited, under_way, strict=True):
        step |= {"wait_seconds": float(one), "transfer_seconds": float(other)}
    (block,) = Measured([record]).blocks(2)
    assert (block.wait_seconds, block.transfer_seconds) == (2.0 / 4, 8.0 / 4)
    assert block.overlap == pytest.approx(0.75)
    assert Block(1.0, 1.0, 2.5, 2.0).overlap == 0.0  # clusters that met late waited longer still
    assert math.isnan(Block(1.0, 1.0).overlap)
    assert math.isnan(Block(1.0, 1.0, 0.0, 0.0).overlap)  # nothing was sent


def test_clusters_share_cores_where_there_are_too_few() -> None:
    own = sorted(os.sched_getaffinity(0))
    count = len(own)
    assert shared_cores(2 * count + 1) == [*own, *own, own[0]]
    assert shared_cores(count) == cores_for(count)
    with pytest.raises(ValueError, match="need a core each"):
        cores_for(count + 1)


def test_a_machine_that_slows_down_steadily_is_no_loss() -> None:
    seconds = [1.0 + 0.01 * step for step in range(24)]  # in four rounds: two blocks
    ceilings = [1.0, 1.12, 1.24]
    shares = [b.utilization for b in Measured([cluster(seconds, ceilings)]).blocks(6)]
    assert shares == pytest.approx([1.0, 1.0], abs=0.01)


def test_a_row_has_the_medians_of_its_blocks(tmp_path: Path) -> None:
    plan = next(p for p in plan_presets(("diloco_delayed",), situation(32), 1.15))
    rounds = 2 * plan.interval
    steps = [s for seconds in (1.1, 1.3, 1.2) for s in [seconds] * rounds]
    measured = Measured([{**cluster(steps, [1.0] * 4), "validation_loss": 2.0}] * 2)
    told: list[str] = []
    runner: Any = None
    bench = Bench(Options(tmp_path, tmp_path), 32.0, runner, told.append)
    row = bench.row(plan, measured, Line(1.0))
    assert row.step_seconds == pytest.approx(1.2)
    assert row.utilization == pytest.approx(1 / 1.2)
    assert row.utilization_spread == pytest.approx((1 / 1.1 - 1 / 1.3) / 2)
    assert row.exposed_seconds == pytest.approx(0.2 * plan.interval)
    assert row.tokens_per_second == pytest.approx(2 * 64 * 128 / 1.2)
    assert (row.shape, row.steps) == ("4,64,64,128", 3 * rounds)
    assert row.planned_bytes == 6 * plan.predict(situation(32)).bytes_per_round


def test_links_meet_at_the_first_cluster_with_keys_of_a_folder(tmp_path: Path) -> None:
    bed = SimpleNamespace(num_clusters=2, address=lambda m: f"10.77.0.{m + 1}")
    runner = Runner(bed, [0, 1], 30.0)  # type: ignore[arg-type]
    for _ in range(2):  # a later run makes them anew
        clusters, link = runner.meeting(KINDS["link/curve"], tmp_path)
    settings = load_config({"dsx": {"preset": "diloco", "clusters": clusters, "link": link}})
    assert settings.link.uses_links and settings.link.settings is not None
    assert settings.link.settings.address_of(1) == "10.77.0.2:29400"
    for cluster in range(2):
        assert load_trust(settings.link.settings, cluster) is not None
    clusters, link = runner.meeting(GLOO, tmp_path)
    assert clusters["rendezvous"] == "tcp://10.77.0.1:29400" and link == {"security": "none"}


def test_a_latency_is_planned_for_with_the_seconds_of_a_step(tmp_path: Path) -> None:
    def bench(latency_milliseconds: float) -> Bench:
        options = Options(tmp_path, tmp_path, latency_milliseconds=latency_milliseconds)
        runner: Any = None
        made = Bench(options, 32.0, runner, lambda line: None)
        made._run = lambda *_: Measured([cluster([0.02] * 30, [0.02])] * 2)  # type: ignore
        return made

    fast, far = bench(0).situation_to_plan(), bench(500).situation_to_plan()
    assert (fast.step_seconds, far.step_seconds) == (1.0, pytest.approx(0.02))
    assert far.link.latency_seconds == 0.5
    assert far.link.bits_per_second == pytest.approx(fast.link.bits_per_second / 0.02)
    one_ways = 6  # handshake, mean and commit, two each: 3 s, which more steps have to hide
    assert planned_interval(far, 1.0) == planned_interval(fast, 1.0) + one_ways * 0.5 / 0.02


@pytest.mark.parametrize("ratio, windows", [(1, 512), (32, 128), (350, 12), (9000, 1)])
def test_batches_are_in_inverse_proportion_to_the_ratio(ratio: float, windows: int) -> None:
    assert Shape.for_ratio(ratio) == Shape(batch_size=windows)
    assert Shape.parse(str(Shape.for_ratio(ratio))) == Shape.for_ratio(ratio)


def test_a_pause_waits_for_transfers_and_nothing_else() -> None:
    from dsx.bench.e2e.worker import settle

    waited: list[str] = []
    under_way = Transfer.__new__(Transfer)
    under_way.pending = SimpleNamespace(wait=lambda: waited.append("waited"))  # type: ignore[assignment]
    handle: Any = SimpleNamespace(loop=SimpleNamespace(in_flight=[NothingYet(0), under_way]))
    settle(handle)
    assert waited == ["waited"]
    assert handle.loop.in_flight == [NothingYet(0), under_way]


class TestTrain:
    """Steps come in blocks, ceilings between them, and pauses are in no step's seconds."""

    def run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_ceiling: bool
    ) -> tuple[Recorded, list[str]]:
        now, sent, log = [0.0], [0], []
        monkeypatch.setattr("dsx.bench.e2e.loop.time.perf_counter", lambda: now[0])
        monkeypatch.setattr("dsx.bench.e2e.loop.ClusterBatches", lambda *a, **k: repeat(None))
        monkeypatch.setattr("dsx.bench.e2e.loop.TokenWindows", lambda *a: None)
        monkeypatch.setattr("dsx.bench.e2e.loop.read_line", lambda: Traffic(sent[0], 0, 0, 0))

        def steps_of(name: str, seconds: float) -> TimedSteps:
            def take_step(windows: Any) -> float:
                log.append(name)
                now[0] += seconds
                sent[0] += 10
                return 0.0

            return TimedSteps(job, 0, take_step)

        def settle() -> None:
            log.append("settle")
            now[0] += 100.0

        job = Job("dsx", {}, Shape(), 6, 2, 2, "data", str(tmp_path), 5.0, ceiling_seconds=1.5)
        ceiling = steps_of("ceiling", 1.0) if with_ceiling else None
        return train(job, steps_of("step", 2.0), ceiling, settle), log

    def test_blocks_and_ceilings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        course, log = self.run(monkeypatch, tmp_path, with_ceiling=True)
        assert [step["seconds"] for step in course.steps] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
        assert course.ceilings == [[1.0, 1.0]] * 4
        pause = ["settle", *["ceiling"] * 7]  # five to warm up
        assert log == [*(pause + ["step"] * 2) * 3, *pause]
        assert course.bytes_in_pauses == 4 * 7 * 10

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
            assert predicted.utilization < 0.6 or plan.name in ("opendiloco", "cocktail_sgd")
    halved = next(plan for plan in plans if plan.name == "opendiloco").predict(here)
    assert 0.65 < halved.utilization < 0.7
    every_step = next(plan for plan in plans if plan.name == "cocktail_sgd")
    assert every_step.method.schedule.interval == every_step.block["schedule"]["interval"] == 1
    assert every_step.bytes_sent(here, 100) == 50 * (every_step.bytes_sent(here, 2) or 0)
    crowded = replace(here, link=replace(here.link, bits_per_second=here.link.bits_per_second / 2))
    late = next(plan for plan in plans if plan.name == "eager").predict(crowded)
    assert late.utilization < 0.6  # so the line is no wider than it needs to be


@pytest.mark.parametrize("name", ["dilocox", "streaming_diloco"])
def test_a_model_with_too_few_layers_is_refused_before_anything_runs(name: str) -> None:
    here = situation(32)
    few = replace(here, parameters=[p for p in here.parameters if "layers.3" not in p.name])
    choices = {"fragments": {"num_fragments": 4}}
    message = rf"{name} does not go with this shape: fragments.num_fragments=4 exceeds"
    with pytest.raises(ValueError, match=message):
        plan_preset(name, 40, few, 1.15, choices)
    assert len(plan_preset(name, 40, few, 1.15).method.fragments.assign(few.parameters)) == 3


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
    job = Job(
        "dsx", {"a": 1}, Shape(2, 32, 16, 4), 10, 5, 2, "data", str(tmp_path / "job"), 5.0, 1.0
    )  # fmt: skip
    assert Job.read(job.write()) == job


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ratios", "x"], "ratios='x' must be numbers"),
        (["--presets", "dilocx"], "presets='dilocx' is not known; allowed: local_sgd"),
        (["--shape", "4,48,64,8"], "HIDDEN a multiple of 32"),
        (["--margin", "0.5"], "margin=0.5 must be 1"),
        (["--clusters", "9"], "clusters=9 must be 2"),
        (["--kinds", "gloo/curve"], "--kinds has 'gloo/curve'; it takes gloo/none, link/none"),
        (["--json", "/no/dir/x"], "--json /no/dir/x: there is no such directory"),
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
    assert 0 < rows["dreamddp"]["utilization"] < 1.1
    assert rows["dreamddp"]["planned_bytes"] is None


@pytest.mark.slow
def test_a_blocking_round_waits_for_a_long_line(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    data, found = tmp_path / "data", tmp_path / "rows.json"
    subprocess.run([*DSX, "data", "build", "--from", "stdlib", "--out", str(data)], check=True)
    shape = ["--shape", "4,32,32,8", "--rounds", "1", "--blocks", "1", "--latency-ms", "100"]
    done = subprocess.run(
        [*DSX, "bench", "e2e", "--data", str(data), "--out", str(tmp_path / "runs"),
         "--ratios", "8", "--presets", "diloco", *shape, "--json", str(found)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    diloco = json.loads(found.read_text())[-1]
    assert diloco["latency_milliseconds"] == 100
    assert diloco["wait_seconds"] > 4 * 0.1  # handshake and mean, each asked for before it comes
    assert "100 ms one way" in done.stdout
