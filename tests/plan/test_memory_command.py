"""`dsx memory`: what it plans with, and what it refuses rather than leaves out."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsx.config.schema import load_config
from dsx.core.exchange import HASHED_PAIRS
from dsx.core.types import Stage
from dsx.plan.gpt_shapes import GPT, Experts
from dsx.plan.memory.plan import plan_stage
from dsx.plan.memory.show import read_plan, show_memory
from dsx.plan.model_files import Batch, Cluster, read_words
from dsx.plan.question import Given, read_question
from dsx.plan.stage_weights import held_on_rank, stage_shapes

CONFIGS = Path(__file__).parents[2] / "configs"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 "
    "--dsx-preset diloco --dsx-num-clusters 2 "
)
MODEL = GPT(layers=4, hidden=64, ffn=256, heads=4, groups=4, vocabulary=256, positions=32)


def document(**changes: Any) -> dict[str, Any]:
    return {"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}}, **changes}


def plan_files(directory: Path, flags: str, deepspeed: dict[str, Any] | None = None) -> Cluster:
    model = directory / "model.flags"
    model.write_text(flags)
    if deepspeed is None:
        return read_plan(model, None, None).cluster
    source = directory / "deepspeed.json"
    source.write_text(json.dumps(deepspeed))
    return read_plan(source, model, 4).cluster


@pytest.mark.parametrize(
    "more",
    [
        "--fp16",
        "--optimizer-cpu-offload",
        "--pipeline-model-parallel-layout Et*4L",
        "--mtp-num-layers 1",
        "--moe-use-legacy-grouped-gemm",
    ],
)
def test_flags_that_change_what_a_rank_holds_are_refused(tmp_path: Path, more: str) -> None:
    with pytest.raises(ValueError, match=more.split()[0]):
        plan_files(tmp_path, FLAGS + more)


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("--dsx-schedule-when after", "schedule.when='after' takes .* where Megatron has not"),
        ("--cuda-graph-impl local", "does not serve --cuda-graph-impl local of Megatron with dsx"),
    ],
)
def test_a_method_that_the_engine_refuses_has_no_memory(
    tmp_path: Path, more: str, refused: str
) -> None:
    flags = FLAGS.replace("diloco", "dreamddp")
    assert plan_files(tmp_path, flags).data == 1
    with pytest.raises(ValueError, match=refused):
        plan_files(tmp_path, f"{flags} {more}")
    after = {"preset": "dreamddp", "clusters": {"num_clusters": 2}, "schedule": {"when": "after"}}
    with pytest.raises(ValueError, match="where DeepSpeed has not reduced its gradients yet"):
        plan_files(tmp_path, FLAGS, document(dsx=after))


def test_flags_that_repeat_the_defaults_are_taken(tmp_path: Path) -> None:
    assert plan_files(tmp_path, f"{FLAGS} --kv-channels 16 --context-parallel-size 1").data == 1


def sliced(
    patterns: list[str] | None = None, kind: str = "column", shape: Any = None, **more: Any
) -> dict[str, Any]:
    """A section of AutoTP's, of one specification where there are patterns."""
    section: dict[str, Any] = {"autotp_size": 2}
    if patterns is None:
        return {"tensor_parallel": {**section, "preset_model": "llama", **more}}
    spec = {"patterns": patterns, "partition_type": kind, "shape": shape}
    return {"tensor_parallel": {**section, "partition_config": {"layer_specs": [spec], **more}}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2 without preset_model"),  # tied
        ({"tensor_parallel": {"autotp_size": "2"}}, "autotp_size='2' must be an integer"),
        ({"tensor_parallel": {"autotp_size": 8, "preset_model": "llama"}}, "size=8 does not div"),
        ({"tensor_parallel": {"autotp_size": 2, "preset_model": "bloom"}}, "'bloom': .* llama and"),
        (sliced(vocab_parallel_lm_head=True), "vocab_parallel_lm_head=true"),
        (sliced(tp={"tp_grain_size": 64}), "tp_grain_size=64 must be 1"),
        (sliced([".*qkv"]), "no pattern of partition_config matches"),
        (sliced([".*_proj"], strict_mode=True), "strict_mode: no pattern for lm_head.weight"),
        (sliced([".*_proj", ".*embed"]), "cuts model.embed_tokens.weight: dsx serves no embedding"),
        (sliced([".*_proj", "lm_head"]), "cuts lm_head.weight"),
        (sliced(["("]), "must be a list of regular expressions"),
        (sliced([".*_proj"], shape=[3, -1]), r"layer_specs\[0\].shape=\[3, -1\]"),
        (sliced([".*_proj"], kind="rows"), "partition_type='rows' must be one of"),
        (sliced([".*_proj"]) | {"sequence_parallel_size": 2}, "size=2 with sequence_parallel"),
        (sliced([".*_proj"]) | {"pipeline": {"stages": 2}}, "size=2 with pipeline.stages=2"),
        ({"moe": {"ep_size": 2}}, "moe.ep_size=2 of a model without experts"),
        ({"moe": {"ep_size": 3}}, "moe.ep_size=3 does not divide the 4 ranks of a stage"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "partition_size=3"),
        ({"sequence_parallel_size": 3}, "sequence_parallel_size=3 does not divide the 4 ranks"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "'auto'"),
        ({"pipeline": {"stages": 3}}, "pipeline.stages=3 does not divide the 4 ranks"),
        ({"pipeline": {"stages": 2, "partition": "best"}}, "partition='best': .*parameters, "),
        ({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}, "stages=2 with .*stage=2"),
        ({"pipeline": {"stages": 2}, "sequence_parallel_size": 2}, "size=2 with pipeline.stages=2"),
    ],
)
def test_keys_that_change_what_a_rank_holds_are_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        stage_shapes(MODEL, plan_files(tmp_path, FLAGS, document(**changes)), Stage())


@pytest.mark.parametrize(
    ("experts", "changes", "named"),
    [
        (6, {"moe": {"ep_size": 4}}, "--num-experts=6 do not divide over moe.ep_size=4"),
        (4, {"zero_optimization": {"stage": 3}}, "--num-experts=4 with zero_optimization.stage=3"),
        (4, {"sequence_parallel_size": 2}, "--num-experts=4 with sequence_parallel_size=2"),
        (4, sliced([".*_proj"]), "--num-experts=4 with tensor_parallel.autotp_size=2"),
        (4, {"pipeline": {"stages": 4}}, "stage 3 has no layer of experts, where DeepSpeed waits"),
    ],
)
def test_experts_that_a_run_refuses_are_refused(
    tmp_path: Path, experts: int, changes: dict[str, Any], named: str
) -> None:
    flags = f"{FLAGS} --num-experts {experts} --moe-layer-freq [1]*3+[0]"
    with pytest.raises(ValueError, match=named):
        plan_files(tmp_path, flags, document(**changes))


def test_experts_whose_ranks_are_not_told_are_said_to_be_on_every_rank(tmp_path: Path) -> None:
    flags = f"{FLAGS} --num-experts 4 --moe-layer-freq [1]*3+[0]"
    untold = plan_files(tmp_path, flags, document())
    assert str(untold).endswith("expert 1 (no moe.ep_size in deepspeed.json)"), str(untold)
    asked = Given(
        deepspeed=tmp_path / "deepspeed.json", model=tmp_path / "model.flags", gpus_per_cluster=4,
        gbps=1.0, step_seconds=1.0, clusters=2,
    )  # fmt: skip
    assert "model: expert 1 (no moe.ep_size in deepspeed.json)" in read_question(asked).facts
    told = plan_files(tmp_path, flags, document(moe={"ep_size": 1}))
    assert "expert" not in str(told)
    assert not any("ep_size" in fact for fact in read_question(asked).facts)
    assert plan_files(tmp_path, FLAGS, document()).untold is None


def test_slices_and_experts_are_the_model_once(tmp_path: Path) -> None:
    sliced_by_default = plan_files(
        tmp_path,
        f"{FLAGS} --untie-embeddings-and-output-weights",
        document(tensor_parallel={"autotp_size": 2}),
    )
    model = replace(MODEL, is_tied=False)
    shapes = stage_shapes(model, sliced_by_default, Stage())
    assert sum(shape.numel for shape in shapes) == model.numel
    cut = {shape.name for shape in shapes if shape.name.endswith(".slice_1")}
    assert len(cut) == 4 * (2 * 3 + 1 + 2 + 1) + 1  # with the biases of columns, and the head
    mixture = replace(MODEL, experts=Experts(4, 128, 2, (True,) * 4))
    experts = Cluster(data=4, zero_stage=1, expert=2)
    assert sum(s.numel for s in stage_shapes(mixture, experts, Stage())) == mixture.numel
    dense, own = held_on_rank(mixture, experts, Stage())
    assert dense + 2 * own == mixture.numel


def test_ranks_are_shared_out_as_a_json_says(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    found = plan_files(tmp_path, FLAGS, document(sequence_parallel_size=2, zero_optimization=zero))
    assert (found.data, found.context, found.shards, found.hpz) == (2, 2, 4, 2)
    bf16 = {"bf16": {"enabled": True}, "pipeline": {"stages": 2}}
    kinds = [{}, {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}]
    first, second = (plan_files(tmp_path, FLAGS, document(**bf16, **kind)) for kind in kinds)
    assert first.zero_stage == 1 and first.accumulated == 2  # DeepSpeed shares its masters, too
    assert second.zero_stage == 1 and second.accumulated == 4
    assert (first.pipeline, first.data, first.partition) == (2, 2, "parameters")


@pytest.mark.parametrize("partition", ["parameters", "uniform", "type:transformer"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_of_a_pipeline_hold_the_model_once(partition: str, is_tied: bool) -> None:
    model = replace(MODEL, is_tied=is_tied)
    cluster = Cluster(pipeline=3, zero_stage=1, partition=partition)
    stages = [Stage(index, 3) for index in range(3)]
    names = [[s.name for s in stage_shapes(model, cluster, stage)] for stage in stages]
    held = [sum(held_on_rank(model, cluster, stage)) for stage in stages]
    assert len({name for own in names for name in own}) == sum(map(len, names))
    tied = 256 * 64 if is_tied else 0
    assert sum(held) == model.numel + tied
    assert [cluster.layers_of(model, index) for index in range(3)] == {
        "parameters": [[0], [1, 2], [3]],
        "uniform": [[0], [1, 2, 3], []],  # the last holds final norm and head
        "type:transformer": [[0, 1], [2], [3]],
    }[partition]
    assert [n for n in names[0] if "tied" in n] == ["tied_modules.embedding.weight"] * is_tied
    with pytest.raises(ValueError, match="8 layers for a pipeline, embedding.* 8 stages or fewer"):
        stage_shapes(model, replace(cluster, pipeline=9), Stage(0, 9))


def test_fp16_takes_what_bf16_takes(tmp_path: Path) -> None:
    kinds = [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}]
    first, second = (plan_files(tmp_path, FLAGS, document(**kind)) for kind in kinds)
    assert first == second and first.is_bf16


def test_under_zero_1_a_rank_holds_one_run_of_all_parameters() -> None:
    """So the fragment of a rank is nearly all it holds, where ranks divide fragments."""
    schedule = {"schedule": {"interval": 8}, "fragments": {"by": "layer", "num_fragments": 2}}
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, **schedule}
    config = load_config({"dsx": block})
    plans = {
        zero: plan_stage(
            MODEL, Cluster(data=8, zero_stage=zero), Stage(), config, Batch(32, 1), False
        )
        for zero in (0, 1, 3)
    }
    run = -(-MODEL.numel // 8)
    assert plans[1].outer.anchor == 4 * run
    longest = {
        zero: (plan.outer.work_space - 2 * 8 * HASHED_PAIRS) // (2 * 4)
        for zero, plan in plans.items()
    }
    assert 0.8 * run < longest[1] <= run
    assert longest[3] < 0.7 * run


def test_a_stage_of_one_layer_is_planned_with_one_fragment_and_told(tmp_path: Path) -> None:
    """What a preset cuts into four where it can; a number that is given is kept to."""
    pipeline = "--pipeline-model-parallel-size 4 --dsx-preset streaming_diloco"
    flags = f"{FLAGS} {pipeline}"
    model = tmp_path / "model.flags"
    model.write_text(flags)
    told = StringIO()
    assert show_memory(read_plan(model, None, None), 40, False, Console(file=told, width=200))
    assert "4 of 4 pipeline stages have 1 layer, and a fragment for each" in told.getvalue()
    model.write_text(f"{flags} --dsx-fragments-num-fragments 1")
    given = StringIO()
    assert show_memory(read_plan(model, None, None), 40, False, Console(file=given, width=200))
    assert "a fragment for each" not in given.getvalue()
    assert given.getvalue().splitlines()[1:] == told.getvalue().splitlines()[2:]
    model.write_text(f"{flags} --dsx-fragments-num-fragments 4")
    with pytest.raises(ValueError, match="num_fragments=4 exceeds the model's 1 layers"):
        show_memory(read_plan(model, None, None), 40, False, Console(file=StringIO()))


def test_the_107_b_stay_within_24_gib_of_a_host_and_13_with_twice_the_ranks(tmp_path: Path) -> None:
    """In bf16 and int8; the file is the paper's else, which needs 29.5 and 16.3 GiB."""
    shipped, paper = CONFIGS / "qwen_107b.flags", CONFIGS / "paper/dilocox/qwen_107b_tp8_pp10.flags"
    words = read_words(shipped)
    at = words.index("--dsx-outer-optimizer-state-dtype")
    short = ["bf16", "--dsx-compression-error-feedback", "int8"]
    assert words[:at] == read_words(paper) and words[at + 1 :] == short
    most = []
    for stages, file in [(10, shipped), (20, shipped), (10, paper), (20, paper)]:
        words = [*read_words(file), "--pipeline-model-parallel-size", str(stages)]
        (tmp_path / "x.flags").write_text(" ".join(words))
        plan = read_plan(tmp_path / "x.flags", None, None)
        stage = Stage(0, stages)
        rank = plan_stage(plan.model, plan.cluster, stage, plan.config, plan.batch)
        most.append(round(rank.outer_on_host / 2**30, 2))
    assert most == [22.91, 12.84, 29.46, 16.35]
