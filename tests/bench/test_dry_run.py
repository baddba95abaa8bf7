"""`dsx dry-run` against small runs of the same cuts: fragments, bytes and sockets, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

import dsx
from dsx.bench.dry_run.asked import Asked
from dsx.bench.dry_run.dry_run import DryRun
from dsx.bench.dry_run.figures import StageFigures
from dsx.cli import app
from dsx.comm.world import current_world
from dsx.config.schema import load_config
from dsx.core.types import Fragment, Slot, Stage
from dsx.plan.memory.plan import plan_stage
from dsx.plan.model_files import Batch, Cluster
from dsx.plan.start_time import start_model
from tests.distributed import run_distributed
from tests.engines import megatrons
from tests.engines.engines import ds_config, quiet
from tests.engines.megatron_plans import planned
from tests.engines.megatrons import Kind, build_engine, dsx_config, needs_megatron, train_step
from tests.engines.test_deepspeed_memory import BLOCK, MODEL, Shapes
from tests.installed import needs

KINDS = {
    2: [
        Kind(tensor=2),
        Kind(pipeline=2, precision="bf16", is_tied=True),
        Kind(precision="bf16", is_sharded=True, layers_per_stage=4),
        Kind(),
        Kind(pipeline=2, chunks=2, is_tied=True, layers_per_stage=4),
        Kind(pipeline=2, layers_per_stage=3, first_stage=2),
        Kind(context=2, precision="bf16", is_sharded=True),
        Kind(family="qwen3"),
        Kind(experts=4, expert_parallel=2),
        Kind(experts=4, expert_parallel=2, precision="bf16", is_sharded=True),
    ],
    4: [
        Kind(tensor=2, pipeline=2, chunks=2, layers_per_stage=4, precision="bf16"),
        Kind(tensor=2, context=2, precision="bf16", is_sharded=True),
        Kind(tensor=2, experts=4, expert_parallel=2, expert_tensor=1),
        Kind(pipeline=2, experts=4, expert_parallel=2, precision="bf16", is_sharded=True),
        Kind(context=2, experts=4, expert_parallel=2),
    ],
}
CHANGES: dict[str, Any] = {
    "compression": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"}
}
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 "
    "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--dsx-preset diloco --dsx-num-clusters 2 "
)


def held(kind: Kind) -> dict[str, Any]:
    """What a rank of a run of this kind has and sends."""
    engine = build_engine(kind, **CHANGES)
    last = follow(engine.handle)
    for step in range(1, 10):
        train_step(engine, step)
    return figures_of_run(engine.handle, last)


def follow(handle: Any) -> dict[int, int]:
    """Return what will hold what the last transfer of each fragment has sent."""
    last: dict[int, int] = {}

    def note(event: dict[str, Any]) -> None:
        last[event["fragment"]] = event["bytes_sent"]

    handle.loop._on_sync = note
    return last


def figures_of_run(handle: Any, last: dict[int, int]) -> dict[str, Any]:
    loop = handle.loop
    fragments = [f.numel for f in loop.adapter.fragments]
    return {
        "fragments": fragments,
        "bytes_sent": sum(last.values()),
        "sockets": len(loop.transport._sockets),
        "threads": 1 + len(loop.transport._fifos),
        "given": dict(loop.state.allocator.given),
        "memory": vars(handle.memory),
        "saved": saved_by(handle),
    }


def saved_by(handle: Any) -> int:
    """Bytes of the one file that a rank's save writes, without what was under way."""
    with tempfile.TemporaryDirectory() as directory:
        handle.write(Path(directory))
        (file,) = Path(directory).glob("*.safetensors")
        content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    ranges = [e["data_offsets"] for n, e in entries.items() if n != "__metadata__"]
    assert len(content) == 8 + length + max(end for _, end in ranges)
    kept = [e["data_offsets"] for n, e in entries.items() if not n.startswith(("__", "in_flight"))]
    return sum(end - begin for begin, end in kept)


def told(figures: StageFigures) -> list[dict[str, Any]]:
    """The same of every rank of a stage that has been built dry."""
    found: list[dict[str, Any]] = []
    for index, rank in enumerate(figures.ranks):
        is_largest = index == figures.largest
        found.append(
            {
                "fragments": [f.numel for f in rank.built.fragments],
                "bytes_sent": list(rank.bytes_sent),
                "sockets": rank.connections(2, 1),
                "threads": rank.threads,
                "memory": vars(figures.memory) if is_largest else None,
                "saved": figures.saved if is_largest else None,
            }
        )
    return found


def all_held(kinds: list[Kind]) -> list[dict[str, Any]]:
    return [held(kind) for kind in kinds]


def all_dry(kinds: list[Kind], ranks: int) -> list[list[dict[str, Any]]]:
    """The same of every rank of one cluster, built without the others."""
    from dsx.bench.dry_run.figures import figures_of
    from dsx.bench.dry_run.megatron import build_rank, ranks_of_stage

    config = load_config(dsx_config(**CHANGES))
    found = []
    for kind in kinds:
        model, cluster = planned(kind, ranks)
        of_kind: list[dict[str, Any]] = []
        for stage in range(kind.pipeline):
            built = [
                build_rank(model, cluster, Batch(megatrons.LENGTH, 2), config, rank)
                for rank in ranks_of_stage(cluster, stage)
            ]
            of_kind += told(figures_of(built, config, has_accelerators=False))
        found.append(of_kind)
    return found


def compare(dry: dict[str, Any], real: dict[str, Any], cluster: int) -> None:
    assert dry["fragments"] == real["fragments"]
    assert dry["bytes_sent"][cluster] == real["bytes_sent"] > 0
    assert (dry["sockets"], dry["threads"]) == (real["sockets"], real["threads"])
    if dry["memory"] is not None:
        assert dry["memory"] == real["memory"]
        assert sum(dry["memory"].values()) == pytest.approx(sum(real["given"].values()), rel=0.05)
        assert dry["saved"] == real["saved"]


def held_by_deepspeed(stages: list[int]) -> list[dict[str, Any]]:
    """What a rank of runs under these stages of ZeRO has and sends."""
    quiet()
    found: list[dict[str, Any]] = []
    for stage in stages:
        config = {**ds_config(stage, "bf16", "diloco"), "dsx": BLOCK}
        if current_world() is None:
            dsx.init_distributed(config)
        model = Shapes()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
        last = follow(engine.dsx)
        for _ in range(9):
            engine.backward(engine())
            engine.step()
        found.append(figures_of_run(engine.dsx, last))
        engine.dsx.close()
        engine.destroy()
    return found


def dry_deepspeed(stages: list[int]) -> list[list[dict[str, Any]]]:
    from dsx.bench.dry_run.deepspeed import build_ranks
    from dsx.bench.dry_run.figures import figures_of

    config, found = load_config({"dsx": BLOCK}), []
    for stage in stages:
        cluster = Cluster(data=2, zero_stage=stage)
        document = {**ds_config(stage, "bf16", "diloco"), "dsx": BLOCK}
        built = build_ranks(MODEL, cluster, document, config)
        found.append(told(figures_of(built, config, False)))
    return found


@needs("deepspeed")
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_ranks_of_deepspeed_are_what_runs_have() -> None:
    stages = [0, 1, 2, 3]
    ranks = run_distributed(held_by_deepspeed, 4, stages, timeout_seconds=240)
    (dry,) = run_distributed(dry_deepspeed, 1, stages, timeout_seconds=240)
    for index in range(len(stages)):
        for number, real in enumerate(ranks):
            compare(dry[index][number % 2], real[index], number // 2)


@needs_megatron
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", KINDS)
def test_ranks_of_megatron_are_what_runs_have(ranks: int) -> None:
    """Of clusters of so many ranks."""
    kinds = KINDS[ranks]
    run = run_distributed(all_held, 2 * ranks, kinds, timeout_seconds=280, engine="megatron")
    (dry,) = run_distributed(all_dry, 1, kinds, ranks, timeout_seconds=120, engine="megatron")
    for index, kind in enumerate(kinds):
        for number, real in enumerate(run):
            compare(dry[index][number % ranks], real[index], number // ranks)
        compare_plan(kind, dry[index])


def compare_plan(kind: Kind, ranks: list[dict[str, Any]]) -> None:
    """Hold `dsx memory` to the dry run: ranges of the distributed optimizer, too, are cut alike."""
    model, cluster = planned(kind, len(ranks))
    config = load_config(dsx_config(**CHANGES))
    for number in range(kind.pipeline):
        stage = Stage(number, kind.pipeline)
        plan = plan_stage(model, cluster, stage, config, Batch(megatrons.LENGTH, 2), False)
        together = cluster.ranks_per_stage
        of_stage = ranks[number * together : (number + 1) * together]
        assert [r["memory"] for r in of_stage if r["memory"]] == [vars(plan.outer)], str(kind)


def refused(tmp_path: Any, *words: str, flags: str = FLAGS) -> str:
    source = tmp_path / "model.flags"
    source.write_text(flags)
    result = CliRunner().invoke(app, ["dry-run", str(source), *words])
    assert result.exit_code == 2
    return result.stderr


@needs_megatron
@pytest.mark.ci
@pytest.mark.parametrize("stages", [1, 2])
def test_stages_are_named_where_there_are_some(stages: int, tmp_path: Any) -> None:
    source = tmp_path / "run.flags"
    late = "--dsx-preset diloco_delayed --dsx-state-device host" if stages == 2 else ""
    source.write_text(f"{FLAGS} --pipeline-model-parallel-size {stages} {late}")
    command = [sys.executable, "-m", "dsx", "dry-run", source, "--json", tmp_path / "x.json"]
    command += ["--gbps", "0.001", "--latency-ms", "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert ("objects: pipeline stages 0, 1\n" in result.stdout) == (stages == 2)
    assert ("own objects\n" in result.stdout) == (stages == 1)
    told = json.loads((tmp_path / "x.json").read_text())
    assert told["bytes_per_round_per_rank"] > 0
    assert told["lanes"] == 2 * stages == told["ranks"]
    assert sum(told["memory_by_part"].values()) >= told["host_bytes_per_rank"]
    memory = CliRunner().invoke(app, ["memory", str(source), "--json"])
    lent = max(rank["lent"] for rank in json.loads(memory.stdout)["ranks"])
    assert told["lent_bytes_per_rank"] == lent and (lent > 0) == bool(late)
    assert ("of host memory more for a while" in result.stdout) == bool(late)
    fragments = max(told["fragments_per_stage"])
    terms = start_model().terms(told["clusters"], told["ranks"], 0.06, fragments)
    assert terms.total < told["start_seconds"] < terms.total + 0.1  # digests of so small a model
    sent = told["start_seconds_unequal"] - told["start_seconds"]
    assert sent == pytest.approx(4 * told["params"] * 8 / 1e6 * 1514 / 1448)
    assert f"a start, from dsx.init_distributed on: {told['start_seconds']:.1f} s" in result.stdout
    assert set(told["assumed"]) == {"step_seconds", "disk_mb_s"}
    assert told["save_seconds"] == pytest.approx(told["save_bytes_per_rank"] / 500e6)
    step = 6 * told["params"] * 32 / (2 * stages * 0.4 * 312e12)  # of one sequence
    assert told["assumed"]["step_seconds"] == pytest.approx(max(1e-6, step))
    assert "(--step-seconds, or --gpu and --mfu); 500 MB/s to the disk" in result.stdout


@needs_megatron
@pytest.mark.ci
def test_over_links_a_start_takes_what_their_model_says(tmp_path: Any) -> None:
    link = {"transport": "link", "streams": 3, "members": ["a=127.0.0.1:29400", "b"]}
    block = {"dsx": {"preset": "diloco", "link": link}}
    (tmp_path / "block.json").write_text(json.dumps(block))
    source = tmp_path / "run.flags"
    source.write_text(f"{FLAGS} --dsx-config {tmp_path / 'block.json'}")
    command = [sys.executable, "-m", "dsx", "dry-run", source, "--json", tmp_path / "x.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    told = json.loads((tmp_path / "x.json").read_text())
    terms = start_model("link").terms(told["clusters"], told["ranks"], 0.04, streams=3)
    assert terms.total < told["start_seconds"] < terms.total + 0.1
    assert start_model("gloo").terms(told["clusters"], told["ranks"]).total != terms.total


@needs_megatron
def test_what_cannot_be_built_is_refused_by_name(tmp_path: Any) -> None:
    assert "alike one has to be among them" in refused(tmp_path, "--build", "0,1")
    assert "a cluster has ranks 0 to 3" in refused(tmp_path, "--build", "4")
    assert "must be numbers of ranks" in refused(tmp_path, "--build", "0,x")
    cut = f"{FLAGS} --pipeline-model-parallel-layout Et*4L"
    assert "-parallel-layout Et*4L: dsx memory plans" in refused(tmp_path, flags=cut)
    assert "num_clusters" in refused(tmp_path, "--clusters", "1000000")
    assert "into buckets" in refused(tmp_path, flags=f"{FLAGS} --overlap-grad-reduce")
    assert "into buckets" in refused(tmp_path, flags=f"{FLAGS} --ddp-bucket-size=40000000")
    assert "sgd: dsx memory plans" in refused(tmp_path, flags=f"{FLAGS} --optimizer sgd")
    assert "--gbps=0 must be" in refused(tmp_path, "--gbps", "0")
    assert "--latency-ms=-1 must be" in refused(tmp_path, "--latency-ms", "-1")
    assert "--gpu b200 is not known; allowed: a100" in refused(tmp_path, "--gpu", "b200")
    assert "leave one out" in refused(tmp_path, "--step-seconds", "2", "--mfu", "0.5")


def test_an_engine_that_is_not_there_is_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr("dsx.bench.dry_run.dry_run.installed_version", nothing)
    assert "pip install 'dsx-train[megatron]'" in refused(tmp_path)
    source = tmp_path / "deepspeed.json"
    source.write_text(json.dumps({"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}}}))
    result = CliRunner().invoke(app, ["dry-run", str(source)])
    assert "pip install 'dsx-train[deepspeed]'" in result.stderr


def test_the_cores_of_a_block_are_in_its_utilization() -> None:
    """Eight fragments of 0.4 GB under way at once; the line takes next to nothing."""
    fragments = [Fragment(f, 0, (Slot(f"w{f}", (10**8,), 0),)) for f in range(8)]
    stages: Any = [SimpleNamespace(ranks=[SimpleNamespace(wire=fragments)])]
    asked, files = Asked(Path("run.json"), step_seconds=0.01, gbps=1e5), cast(Any, None)
    found: list[float] = []
    for coding in ({"cores": 1}, {"cores": 8}, {}):
        block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "coding": coding}
        told = DryRun(asked, files, load_config({"dsx": block}), stages, [0]).utilization
        found.append(told)
    assert found[0] < found[1] == found[2]
