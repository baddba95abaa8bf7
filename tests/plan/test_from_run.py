"""Figures out of a run's records, and a plan that starts from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.config.schema import preset
from dsx.method.fragments import WholeModel
from dsx.plan.from_run import read_run
from dsx.plan.link import Costs
from dsx.plan.question import Given, read_question
from dsx.plan.traffic import Traffic

NUMEL = 4 * 12 * 256**2
START = {
    "kind": "start",
    "step": 0,
    "preset": "diloco",
    "num_clusters": 2,
    "ranks": 2,
    "stages": 1,
    "axes": {"compression": {"type": "dense"}},
    "parameters": [{f"layers.{i}.mlp": [3072, 256] for i in range(4)}],
}


def write_run(directory: Path, cluster: int, late: float = 0.0, **start: Any) -> None:
    """Write 40 steps of 0.5 s, every 10th with a sync of which 2 s are waited for.

    2 s of the transfer are messages (4 bytes of each element), half a second is coding.
    """
    records: list[dict[str, Any]] = [START | start]
    for step in range(1, 41):
        is_sync = step % 10 == 0
        seconds = 4.0 if step == 1 else 0.5  # the first steps compile
        record = {"kind": "step", "step": step, "seconds": seconds, "blocked_seconds": 0.0}
        if is_sync:
            blocked = 2.5 + NUMEL * 1e-8
            record |= {"seconds": seconds + blocked, "blocked_seconds": blocked}
            sync = {"kind": "sync", "fragment": 0, "launched_step": step, "applied_step": step}
            sync |= {"numel": NUMEL, "bytes_sent": 4 * NUMEL, "wait_seconds": 2.5}
            sync |= {"transfer_seconds": 2.5 + late, "coding_seconds": 0.5}
            records.append(sync)
        records.append(record)
    name = "metrics.jsonl" if cluster == 0 else f"metrics.cluster_{cluster}.jsonl"
    lines = [json.dumps({"cluster": cluster, "time": 0.0, **record}) for record in records]
    (directory / name).write_text("\n".join([*lines, '{"kind": "step", "st']))


def write_pipeline(directory: Path) -> None:
    """Write a run of two stages of two ranks, of which the second one waits longer."""
    write_run(directory, 0, ranks=4, stages=2)
    path = directory / "metrics.jsonl"
    changed: list[str] = []
    for line in path.read_text().splitlines()[:-1]:
        changed.append(line)
        record = json.loads(line)
        if record["kind"] == "sync":
            changed.append(json.dumps(record | {"stage": 1, "wait_seconds": 7.0}))
    path.write_text("\n".join(changed))


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_what_the_records_tell(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    write_run(tmp_path, 1, late=3.0)  # which waited for cluster 0 in its transfers
    figures = read_run(tmp_path)
    assert figures.step_seconds == pytest.approx(0.5)
    assert figures.payload_bits_per_second == pytest.approx(8 * 4 * NUMEL / 2.0)
    assert figures.coding_seconds_per_element == pytest.approx(0.5 / (NUMEL / 2))
    assert figures.blocking_seconds_per_element == pytest.approx(2e-8)
    assert (figures.num_clusters, figures.ranks, figures.preset) == (2, 2, "diloco")
    assert sum(p.numel for p in figures.parameters) == NUMEL
    assert (figures.num_steps, figures.num_syncs) == (2 * 34, 8)


def test_waits_for_cores_are_neither_the_line_s_nor_the_codec_s(tmp_path: Path) -> None:
    write_run(tmp_path, 0, coding_cores=1)
    alone = read_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()[:-1]
    for at, line in enumerate(lines):
        record = json.loads(line)
        if record["kind"] == "sync":
            waited = {"transfer_seconds": record["transfer_seconds"] + 3.0, "turn_seconds": 3.0}
            lines[at] = json.dumps(record | waited)
    path.write_text("\n".join(lines))
    queued = read_run(tmp_path)
    assert queued.coding_seconds_per_element == alone.coding_seconds_per_element
    assert queued.payload_bits_per_second == pytest.approx(alone.payload_bits_per_second)


def test_a_plan_from_it_says_what_it_took_and_what_is_not_known(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    result = plan("--from-run", str(tmp_path), "--target", "80", "--top", "3")
    assert result.exit_code == 0, result.output
    for fact in (
        "diloco, 2 clusters of 2 ranks, 34 steps without a sync, 4 syncs",
        "step: 0.5 s, the median without launches, waits and outer steps",
        "line: at least 0.05033 Gbit/s of payload",
        "in whose time latency and waits for others' coding are, too",
        "latency: 0, as no record tells it apart",
        "training thread: 20 ns per element of a rank at launch and apply, as the run's",
    ):
        assert fact in result.stdout


def test_a_plan_for_another_line_and_more_clusters(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    line = ["--gbps", "1", "--latency-ms", "5", "--clusters", "4", "--json"]
    found = json.loads(plan("--from-run", str(tmp_path), *line).stdout)
    assert (found["num_clusters"], found["parameters"]) == (4, NUMEL)
    assert found["link"]["latency_seconds"] == 0.005
    ranks = [c["rank"] for c in found["candidates"] if c["preset"] == "dilocox"]
    assert ranks and ranks[0] <= 64  # of matrices 256 wide


def test_a_pipeline_of_which_only_fragments_are_known(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    result = plan("--from-run", str(tmp_path), "--gbps", "1", "--target", "50")
    assert result.exit_code == 0, result.output
    assert "records tell only the sizes of fragments" in result.stdout
    assert "dilocox" not in result.stdout.split("harm")[1]


def test_of_a_pipeline_a_stage_s_ranks_code_and_rank_0_waits_for_its_own(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    figures = read_run(tmp_path)
    assert figures.coding_seconds_per_element == pytest.approx(0.5 / (NUMEL / 2))
    assert figures.blocking_seconds_per_element == pytest.approx(2e-8)
    assert figures.payload_bits_per_second == pytest.approx(2 * 8 * 4 * NUMEL / 2.0)
    assert figures.fragment_numels == ((NUMEL,), (NUMEL,))


@pytest.mark.parametrize("num_clusters", [2, 5])
@pytest.mark.parametrize("wire", ["fp32", "int8", "int4", "bf16"])
def test_coding_is_planned_to_take_what_the_run_s_took(
    tmp_path: Path, wire: str, num_clusters: int
) -> None:
    block: dict[str, Any] = {"type": "dense"}
    if wire != "fp32":
        block = {"type": "quantized", "wire": wire, "error_feedback": "fp32"}
    write_run(tmp_path, 0, axes={"compression": block}, num_clusters=num_clusters)
    read = read_question(Given(from_run=tmp_path))
    method, question = preset("diloco", num_clusters, compression=block), read.question
    traffic = Traffic(method, question.model.loads(WholeModel(), method.compression), num_clusters)
    cost = traffic.cost(0, question.link, question.costs)
    assert cost.before + cost.after == pytest.approx(0.5, rel=1e-3)
    (fact,) = [fact for fact in read.facts if fact.startswith("coding: the run's took 318 ns")]
    assert ("are planned at" in fact) and (wire == "fp32" or f"so {wire}, copies" in fact)


def test_coding_that_is_not_of_one_format_is_not_planned_with(tmp_path: Path) -> None:
    write_run(tmp_path, 0, axes={"compression": {"type": "low_rank", "exclude": ["embed"]}})
    read = read_question(Given(from_run=tmp_path))
    assert read.question.costs.formats == Costs().formats
    assert any("not planned with, as it is of low_rank" in fact for fact in read.facts)


def test_records_that_do_not_suffice(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match='no "start" record'):
        read_run(tmp_path)
    path.write_text("\n".join(lines[:2]))
    with pytest.raises(ValueError, match="no step beyond the first 2 without a sync"):
        read_run(tmp_path)


def test_the_cores_that_a_run_codes_on_are_its_plans(tmp_path: Path) -> None:
    write_run(tmp_path, 0, coding_cores=3)
    assert read_run(tmp_path).coding_cores == 3
    asked = {"from_run": tmp_path, "gbps": 1.0}
    read = read_question(Given(**asked))
    assert read.question.costs.cores == 3
    assert any("at most 3 of a rank's cores at a time, as the run's" in f for f in read.facts)
    given = read_question(Given(**asked, coding_cores=2)).question
    assert given.costs.cores == 2
    # what the run had by default is not told to the next one, which may be of another machine
    assert (read.question.coding_cores, given.coding_cores) == (None, 2)


def test_the_cores_of_a_run_are_in_no_block_that_is_offered(tmp_path: Path) -> None:
    write_run(tmp_path, 0, coding_cores=3)
    asked = ["--from-run", str(tmp_path), "--gbps", "1", "--target", "50", "--json"]
    blocks = [c["dsx"] for c in json.loads(plan(*asked).stdout)["candidates"]]
    assert blocks and not any("coding" in block for block in blocks)
    blocks = [
        c["dsx"] for c in json.loads(plan(*asked, "--coding-cores", "2").stdout)["candidates"]
    ]
    assert blocks and all(block["coding"] == {"cores": 2} for block in blocks)
