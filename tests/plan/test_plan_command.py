"""`dsx plan`, as it is called: what it ranks, what it offers, what it refuses."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.config.schema import load_config
from dsx.core.types import Stage
from dsx.method.choices import PRESETS
from dsx.plan.candidates import Question, Search
from dsx.plan.launch_cost import launch_cost
from dsx.plan.link import Link
from dsx.plan.memory.plan import plan_stage
from dsx.plan.model import from_files, from_sizes
from dsx.plan.model_files import read_model
from dsx.plan.offer import block_of, flags_of
from dsx.plan.predict import at_interval
from dsx.plan.ranking import best_of_each, harm, ranked
from dsx.plan.variants import with_steps
from tests.flags import read_flags

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "configs" / "qwen_107b.flags"
SIZES = "--params 7e9 --layers 32 --hidden 4096 --gpus-per-cluster 8 --clusters 2".split()  # noqa: SIM905
STEP = ["--step-seconds", "2"]
GIB = 2**30


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def answer(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def question(**changes: Any) -> Question:
    model = from_sizes(7e9, 32, 4096, 8)
    return replace(Question(model, 2.0, Link(1e9, 0.02), 2), **changes)


def test_every_candidate_is_what_its_block_and_its_flags_say() -> None:
    num_clusters = 5
    asked = question(num_clusters=num_clusters, memory_limit=8 * GIB)
    candidates = list(Search(asked).candidates())
    assert {c.preset for c in candidates} == set(PRESETS)
    assert {c.is_state_on_host for c in candidates} == {True, False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for candidate in candidates:
            block = block_of(candidate, asked)
            config = load_config({"dsx": block})
            method = candidate.method
            if config.method.delay.uses_seconds:  # a run measures it; a plan takes a number
                method = with_steps(method, "auto")
            assert config.method == method
            assert (config.state.device == "host") == candidate.is_state_on_host
            assert config.clusters.num_clusters == num_clusters
            patience = config.clusters.deadline_seconds / candidate.prediction.transfer_seconds
            assert patience >= 3
            by_flags = read_flags(shlex.split(flags_of(block)))
            assert (by_flags.axes, by_flags.state) == (config.axes, config.state)


def test_a_search_that_lasts_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for soon, told in ((60.0, 0), (-1.0, 1)):
        monkeypatch.setattr("dsx.plan.candidates.SOON", soon)
        found = [*Search(question()).candidates()]
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == told
    assert lines[0].startswith(f"candidates: 1 of {len(found)}, ")


def test_the_target_comes_first_then_the_least_harm() -> None:
    asked = question()
    order = ranked(Search(asked).candidates(), asked)
    reached = [c.prediction.utilization >= asked.target for c in order]
    assert reached == sorted(reached, reverse=True) and True in reached
    met = [harm(c) for c, is_met in zip(order, reached, strict=True) if is_met]
    assert met == sorted(met)
    assert [c.preset for c in best_of_each(order)] == list(dict.fromkeys(c.preset for c in order))


def test_codes_made_at_the_launch_are_counted() -> None:
    search = Search(question())
    exposed = {
        (c.preset, c.codec.name): search.predict(at_interval(c.method, 100)).exposed_seconds
        for c in search.candidates()
    }
    assert exposed["eager", "fp32"] == exposed["diloco_delayed", "fp32"]
    assert exposed["eager", "int4"] > exposed["diloco_delayed", "int4"]


def test_a_smaller_h_no_delay_and_finer_codes_harm_less() -> None:
    candidates = list(Search(question()).candidates())
    by_name = {(c.preset, c.codec.name): c for c in candidates}
    at_100 = {key: replace(c, method=at_interval(c.method, 100)) for key, c in by_name.items()}
    first = at_100["diloco", "fp32"]
    assert harm(first) < harm(replace(first, method=at_interval(first.method, 101)))
    assert harm(first) < harm(at_100["diloco", "int8"]) < harm(at_100["diloco", "int4"])
    assert harm(first) < harm(at_100["eager", "fp32"]) < harm(at_100["diloco_delayed", "fp32"])
    assert harm(at_100["diloco_delayed", "int4"]) < harm(at_100["dilocox", "low rank"])


def test_each_takes_the_least_interval_that_reaches_the_target() -> None:
    asked = question()
    search = Search(asked)
    for candidate in search.candidates():
        if candidate.preset == "cocktail_sgd":  # of every step
            assert candidate.interval == 1
            continue
        if candidate.prediction.utilization < asked.target:
            assert candidate.interval == asked.max_interval
            continue
        allowed = [h for h in asked.intervals(asked.max_interval) if h < candidate.interval]
        if not allowed or candidate.method.delay.steps:
            continue
        less = search.predict(at_interval(candidate.method, allowed[-1]))
        assert less.utilization < asked.target


def test_the_least_bandwidth_reaches_the_target_and_less_does_not() -> None:
    asked = question()
    search = Search(asked)
    for candidate in best_of_each(ranked(search.candidates(), asked)):
        least = search.least_bits_per_second(candidate)
        if candidate.preset == "cocktail_sgd":  # its codes take too long for that step on any line
            assert least is None
            assert search.at(candidate, 1e15).utilization < asked.target
            continue
        assert least is not None
        assert search.at(candidate, least).utilization >= asked.target
        assert search.at(candidate, 0.98 * least).utilization < asked.target


def test_memory_is_that_of_dsx_memory() -> None:
    files = read_model(QWEN, None, None)
    asked = Question(from_files(files), 60.0, Link(1e9), 2, memory_limit=40 * GIB)
    for candidate in best_of_each(ranked(Search(asked).candidates(), asked))[::3]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = load_config({"dsx": block_of(candidate, asked)})
        real = plan_stage(files.model, files.cluster, Stage(0, 10), config, files.batch)
        assert candidate.on_host == pytest.approx(real.outer_on_host, rel=0.02)
        assert candidate.on_device == pytest.approx(real.outer_on_device, rel=0.02)
        assert asked.model.inner_bytes == real.inner.total


def test_files_sizes_and_estimates_agree() -> None:
    flags = ["--megatron", str(QWEN), "--clusters", "2", "--gbps", "1"]
    found = answer(*flags, "--gpu", "a800", "--top", "1")
    assert found["parameters"] == pytest.approx(107.2e9, rel=1e-3)
    assert found["ranks"] == 80 and len(found["candidates"]) == 1
    expected = 6 * found["parameters"] * 256 * 4096 / (80 * 312e12 * 0.4)
    assert found["step_seconds"] == pytest.approx(expected)
    assert found["is_target_reached"]
    assert found["candidates"][0]["utilization"] >= 0.95


def test_what_the_training_thread_does_is_in_the_utilization(tmp_path: Path) -> None:
    """Twice the launch and apply of the largest size, by the slowest codec, per element."""
    figures = [
        {"numel": 10, "launch_ms": 1e9, "apply_ms": 1e9},
        {"numel": 10**8, "launch_ms": 100.0, "apply_ms": 200.0},
        {"numel": 10**8, "launch_ms": 100.0, "apply_ms": 300.0},
    ]
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(figures))
    asked = ["--params", "8e9", "--layers", "8", "--gpus-per-cluster", "8", "--gbps", "1000"]
    asked += ["--clusters", "2", "--step-seconds", "2", "--target", "1"]
    without, found = answer(*asked), answer(*asked, "--launch", str(path))
    assert any("4 ns per element of a rank" in fact for fact in found["facts"])
    usual = f"{1e9 * launch_cost().seconds_per_element:.3g} ns per element of a rank"
    assert any(usual in fact and "--launch measures" in fact for fact in without["facts"])
    for row, free in zip(found["candidates"], without["candidates"], strict=True):
        if (row["preset"], row["interval"]) == (free["preset"], free["interval"]) == ("diloco", 5):
            more = row["round_seconds"] - free["round_seconds"]
            assert more == pytest.approx(1e9 * (4e-9 - launch_cost().seconds_per_element))
            break
    else:
        raise AssertionError("no row of diloco at H 5")
    path.write_text("[]")
    with pytest.raises(AssertionError, match="write it by dsx bench overhead --json"):
        answer(*asked, "--launch", str(path))


def test_what_a_plan_writes(tmp_path: Path) -> None:
    record, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    line = ["--gbps", "2", "--latency-ms", "20", "--top", "3"]
    result = call(*SIZES, *STEP, *line, "--json-file", str(record), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    best = json.loads(record.read_text())["candidates"][0]
    assert best["flags"] in result.stdout
    assert f'"preset": "{best["preset"]}"' in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_measured_line_and_measured_codecs(tmp_path: Path) -> None:
    link, codec = tmp_path / "net.json", tmp_path / "codec.json"
    link.write_text(
        json.dumps({"bits_per_second": 5e8, "latency_seconds": 0.03, "streams": 4, "clusters": 2})
    )
    figure = {"format": "int4", "device": "cpu", "encode_gb_per_second": 0.01}
    figure |= {"decode_gb_per_second": 0.01, "encode_ef_gb_per_second": 0.01}
    codec.write_text(json.dumps([{**figure, "memcpy_gb_per_second": 5.0}]))
    found = answer(*SIZES, *STEP, "--link", str(link))
    assert found["link"] == {"bits_per_second": 5e8, "latency_seconds": 0.03, "payload_share": 1}
    diloco = next(c for c in found["candidates"] if c["preset"] == "diloco")
    assert diloco["codec"] == "int4"
    assert load_config({"dsx": diloco["dsx"]}).link.streams == 4
    assert read_flags(shlex.split(diloco["flags"])).link.streams == 4
    found = answer(*SIZES, *STEP, "--link", str(link), "--codec", str(codec))
    diloco = next(c for c in found["candidates"] if c["preset"] == "diloco")
    assert diloco["codec"] != "int4"


def test_what_is_out_of_reach_says_what_would_reach_it() -> None:
    line = ["--gbps", "0.001", "--latency-ms", "20", "--max-interval", "20"]
    result = call(*SIZES, *STEP, *line)
    assert result.exit_code == 1
    assert "no preset reaches 95 % with H up to 20; what would:" in result.stdout
    for advice in ("- a line of ", "- H of ", "- a stronger codec: "):
        assert advice in result.stdout
    assert not answer(*SIZES, *STEP, *line, exit_code=1)["is_target_reached"]


def test_what_does_not_fit_comes_last() -> None:
    flags = ["--megatron", str(QWEN), "--clusters", "2", "--gbps", "1", "--gpu", "a100"]
    found = answer(*flags, "--memory-limit", "1", "--top", "1", exit_code=1)
    assert not any(c["is_fitting"] for c in found["candidates"])


def test_the_line_s_clusters_are_those_of_the_plan(tmp_path: Path) -> None:
    link = tmp_path / "net.json"
    link.write_text(
        json.dumps({"bits_per_second": 5e8, "latency_seconds": 0.03, "streams": 1, "clusters": 3})
    )
    assert answer(*SIZES[:-2], *STEP, "--link", str(link))["num_clusters"] == 3
    assert answer(*SIZES[:-1], "3", *STEP, "--link", str(link))["num_clusters"] == 3
    result = call(*SIZES, *STEP, "--link", str(link))
    assert result.exit_code == 2
    assert "--clusters 2, but" in result.stderr and "was measured between 3" in result.stderr


@pytest.mark.parametrize(
    "figures", ['{"format": "int4"}', "[3]", '[{"device": "cpu", "format": "int4"}]', "3"]
)
def test_what_are_no_codec_figures_is_said(tmp_path: Path, figures: str) -> None:
    codec = tmp_path / "codec.json"
    codec.write_text(figures)
    result = call(*SIZES, *STEP, "--gbps", "1", "--codec", str(codec))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "write it by dsx bench codec --json" in result.stderr


@pytest.mark.parametrize(
    "record",
    [
        "[]", '{"bits_per_second": 1e9}',
        '{"bits_per_second": 1e9, "latency_seconds": 0, "streams": []}',
        '{"bits_per_second": 1e9, "latency_seconds": 0, "clusters": "2"}',
    ],
)  # fmt: skip
def test_what_is_no_measured_line_is_said(tmp_path: Path, record: str) -> None:
    link = tmp_path / "link.json"
    link.write_text(record)
    result = call(*SIZES, *STEP, "--link", str(link))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "write it by dsx net-test --json" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gbps", "1"], "the model is given by nothing: give one of --megatron"),
        ([*SIZES, "--gbps", "1"], "a step's seconds are given by nothing"),
        ([*SIZES, *STEP], "the line is missing: give --gbps G"),
        ([*SIZES, *STEP, "--gbps", "-1"], "--gbps=-1 must be 1e-09 to"),
        ([*SIZES, *STEP, "--gbps", "0"], "--gbps=0 must be"),
        ([*SIZES, *STEP, "--gbps", "nan"], "--gbps=nan must be"),
        ([*SIZES, *STEP, "--gbps", "1", "--latency-ms", "-3"], "--latency-ms=-3 must be 0 to"),
        ([*SIZES, "--step-seconds", "0", "--gbps", "1"], "--step-seconds=0 must be"),
        ([*SIZES[:-1], "0", *STEP, "--gbps", "1"], "--clusters=0 must be 2 to"),
        ([*SIZES, *STEP, "--gbps", "1", "--gpus-per-cluster", "0"], "--gpus-per-cluster=0 must"),
        ([*SIZES, *STEP, "--gbps", "1", "--gpus-per-cluster", "-3"], "--gpus-per-cluster=-3 must"),
        ([*SIZES, *STEP, "--gbps", "1", "--hidden", "0"], "--hidden=0 must be 1 to"),
        ([*SIZES, *STEP, "--gbps", "1", "--params", "0"], "--params=0 must be 1 to"),
        ([*SIZES, *STEP, "--gbps", "1", "--memory-limit", "-1"], "--memory-limit=-1 must be"),
        ([*SIZES, *STEP, "--gbps", "1", "--mfu", "0.1"], "--mfu goes with --gpu"),
        ([*SIZES, *STEP, "--gbps", "1", "--tokens-per-step", "5"], "--tokens-per-step goes with"),
        ([*SIZES, *STEP, "--gbps", "1", "--model", "x"], "--model goes with --deepspeed"),
        (["--megatron", str(QWEN), "--layers", "3"], "--layers goes with --params"),
        (["--megatron", str(QWEN), "--hidden", "3"], "--hidden goes with --params"),
        (
            [*SIZES, *STEP, "--gbps", "1", "--json-file", "/no/dir/x"],
            "--json-file /no/dir/x: there",
        ),
        ([*SIZES, *STEP, "--gbps", "1", "--plot", "/no/dir/x.png"], "--plot /no/dir/x.png: there"),
        ([*SIZES, *STEP, "--gbps", "1", "--plot", "/tmp"], "--plot /tmp: is a directory"),
        (
            [*SIZES, *STEP, "--link", "/tmp"],
            "no config file at /tmp, which is a folder; give a file",
        ),
        (
            [*SIZES, *STEP, "--gbps", "1", "--codec", "/tmp"],
            "no config file at /tmp, which is a folder; give a file",
        ),
        (["--megatron", "/tmp", "--clusters", "2", *STEP, "--gbps", "1"], "/tmp"),
        ([*SIZES, "--gbps", "1", "--gpu", "v100"], "--gpu v100 is not known; allowed: a100"),
        ([*SIZES, "--gbps", "1", "--gpu", "a100"], "--gpu needs --tokens-per-step"),
        ([*SIZES, *STEP, "--gbps", "1", "--target", "100"], "target=100 must be"),
        (
            [*SIZES, *STEP, "--link", "nowhere.json"],
            "no config file at nowhere.json: give the path",
        ),
        ([*SIZES, *STEP, "--gbps", "1", "--link", "x"], "give the line twice"),
        (["--params", "1e9", "--gbps", "1"], "--params needs --layers N"),
        (["--from-run", "nowhere"], "no run directory at nowhere"),
        ([*SIZES[:-1], "1", *STEP, "--gbps", "1"], "clusters=1 must be 2 to"),
    ],
)
def test_mistakes_end_with_one_line(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_thousand_layers_and_thirty_two_clusters_are_no_search_without_end() -> None:
    """About a second alone; ten times that leaves room for a loaded machine."""
    sizes = "--params 1e12 --layers 1000 --hidden 8192 --gpus-per-cluster 128 --clusters 32"
    started = time.process_time()
    found = answer(*sizes.split(), "--step-seconds", "60", "--gbps", "10", "--latency-ms", "40")
    assert time.process_time() - started < 10
    assert len(found["candidates"]) == len(PRESETS)


def test_the_cores_of_coding_are_planned_with_and_offered() -> None:
    asked = ["--params", "8e9", "--layers", "8", "--gpus-per-cluster", "8", "--gbps", "10"]
    asked += ["--clusters", "2", "--step-seconds", "2", "--target", "1"]
    without, found = answer(*asked), answer(*asked, "--coding-cores", "1")
    assert "coding: on at most 1 of a rank's cores at a time" in found["facts"]
    assert not any("rank's cores" in fact for fact in without["facts"])
    seconds: list[dict[str, float]] = []
    for rows in (without, found):
        seconds.append({r["preset"]: r["round_seconds"] for r in rows["candidates"]})
    assert seconds[1]["diloco"] >= seconds[0]["diloco"]
    best = found["candidates"][0]
    assert best["dsx"]["coding"] == {"cores": 1} and "--dsx-coding-cores 1" in best["flags"]
    chosen = without["candidates"][0]
    assert chosen["coding_cores"] == chosen["coding_cores_hiding"] == 1
    assert "coding" not in chosen["dsx"] and best["coding_cores_hiding"] is None
    bounded = answer(*asked, "--cores-per-rank", "16")["candidates"][0]
    assert bounded["dsx"]["coding"] == {"cores": bounded["coding_cores"]}
    with pytest.raises(AssertionError, match="--coding-cores=5000 must be 1 to 4096"):
        answer(*asked, "--coding-cores", "5000")
