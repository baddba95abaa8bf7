"""How Megatron's flags cut a model: experts, context parallelism, virtual and uneven stages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dsx.core.types import Stage
from dsx.plan.inner_memory import Routed, megatron, recomputed_activations
from dsx.plan.megatron_flags import model_of, parse
from dsx.plan.model_files import ModelFiles, read_model
from dsx.plan.pipeline_split import PipelineSplit
from dsx.plan.stage_weights import held_on_rank, inner_of, stage_shapes

DENSE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 "
    "--disable-bias-linear --ffn-hidden-size 96 "
)
EXPERTS = f"{DENSE} --num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 2 "


def read(flags: str, directory: Path, ranks: int | None = None) -> ModelFiles:
    source = directory / "model.flags"
    source.write_text(flags)
    return read_model(source, None, ranks)


@pytest.mark.parametrize(
    ("split", "num_layers", "count", "layers"),
    [
        (PipelineSplit(), 4, 2, [[[0, 1]], [[2, 3]]]),
        (PipelineSplit(chunks=2), 8, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (PipelineSplit(first=1), 7, 3, [[[0]], [[1, 2, 3]], [[4, 5, 6]]]),
        (PipelineSplit(first=1, last=2), 3, 2, [[[0]], [[1, 2]]]),
        (PipelineSplit(2, last=2), 6, 2, [[[0, 1], [3, 4]], [[2], [5]]]),
        (PipelineSplit(counts_embedding=True, counts_loss=True), 4, 2, [[[0, 1]], [[2, 3]]]),
        (
            PipelineSplit(2, counts_embedding=True, counts_loss=True),
            6,
            2,
            [[[0], [3, 4]], [[1, 2], [5]]],
        ),
    ],
)
def test_layers_go_to_stages(
    split: PipelineSplit, num_layers: int, count: int, layers: list[Any]
) -> None:
    found = split.layers(num_layers, count)
    assert [[list(chunk) for chunk in chunks] for chunks in found] == layers


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (PipelineSplit(counts_loss=True), "9 layers do not divide into 2"),
        (PipelineSplit(chunks=3), "stages of 4 layers do not divide into 3 virtual"),
        (PipelineSplit(first=8, last=1), "-1 do not divide"),
        (PipelineSplit(first=3, counts_loss=True), "Megatron takes one of both"),
    ],
)
def test_what_does_not_divide_is_refused(split: PipelineSplit, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split.layers(8, 2)


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ("", "1111"),
        ("--moe-layer-freq 2", "1010"),
        ("--moe-layer-freq ([0]*1+[1]*3)", "0111"),
        ("--moe-layer-freq [0,1]*2", "0101"),
        ("--moe-layer-freq '[0, 1, 1, 0]'", "0110"),
    ],
)
def test_experts_are_in_the_layers_that_the_flags_name(more: str, pattern: str) -> None:
    experts = model_of(parse(shlex.split(EXPERTS + more))).experts
    assert experts is not None
    assert "".join(str(int(has)) for has in experts.layers) == pattern


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--moe-layer-freq [1]*3", "of 3 layers, not of --num-layers=4"),
        ("--moe-layer-freq x", "neither a whole number nor a list"),
        ("--moe-layer-freq [2]*4", "neither a whole number nor a list"),
        ("--expert-model-parallel-size 3", "=8 do not divide over --expert-model-parallel-size=3"),
        ("--expert-tensor-parallel-size 2", "where every rank holds all experts: use 1"),
        ("--moe-router-topk 9", "topk=9 exceeds --num-experts=8"),
        ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias: dsx memory plans"),
    ],
)
def test_experts_that_are_not_served_are_refused_by_name(more: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("*", r"\*")):
        model_of(parse(shlex.split(EXPERTS + more)))


@pytest.mark.parametrize(
    ("flags", "width"),
    [("", 4 * 1000), ("--swiglu", 2624), ("--quick-geglu", 4 * 1000), ("--swiglu --bf16", 2624)],
)
def test_the_mlp_is_as_wide_as_megatron_makes_it(flags: str, width: int) -> None:
    """Of SwiGLU 64 x floor(8/3 x 1000 / 64), 2666.7 in whole 64s; an expert is as wide."""
    size = "--num-layers 4 --hidden-size 1000 --num-attention-heads 4 --seq-length 32 "
    size += "--vocab-size 256 --disable-bias-linear --num-experts 2 --moe-layer-freq 2 "
    model = model_of(parse(shlex.split(size + flags)))
    assert model.experts is not None
    assert (model.ffn, model.experts.ffn) == (width, width)
    assert model.is_gated == ("glu" in flags)


@pytest.mark.parametrize(
    "more",
    [
        "--optimizer sgd", "--optimizer muon", "--use-megatron-fsdp", "--use-torch-fsdp2",
        "--num-distributed-optimizer-instances 2", "--fp8-param-gather", "--grad-reduce-in-bf16",
        "--heterogeneous-layers-config-path x.json", "--hybrid-override-pattern M-M*",
        "--experimental-attention-variant gated_delta_net", "--linear-attention-freq 2",
        "--softmax-type learnable", "--padded-vocab-size 512", "--spec local", "--yaml-cfg x.yaml",
        "--qk-l2-norm",
    ],
)  # fmt: skip
def test_what_no_formula_tells_is_refused_by_name_and_value(more: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(more)}: dsx memory plans GPTs of attention"):
        parse(shlex.split(DENSE + more))


def test_values_that_change_nothing_are_taken() -> None:
    more = "--optimizer adam --num-distributed-optimizer-instances 1 --softmax-type vanilla"
    more += " --fp8-format e4m3 --transformer-impl local -- --x"
    assert model_of(parse(shlex.split(f"{DENSE} {more}"))) == model_of(parse(shlex.split(DENSE)))


@pytest.mark.parametrize(
    ("more", "whole"),
    [
        ("--num-query-group 8", "--num-query-group is short for --num-query-groups;"),
        ("--swig", "--swig is short for --swiglu;"),
        ("--tensor-model=2", "--tensor-model is short for --tensor-model-parallel-size;"),
        ("--grad-reduce", "--grad-reduce is short for --grad-reduce-in-bf16;"),
    ],
)
def test_abbreviations_that_megatron_takes_are_refused(more: str, whole: str) -> None:
    with pytest.raises(ValueError, match=f"{whole} write the name in full"):
        parse(shlex.split(DENSE + more))


def test_rotary_positions_by_their_older_flags() -> None:
    rotary = "--use-rotary-position-embeddings"
    assert model_of(parse(shlex.split(DENSE))).positions == 32
    assert model_of(parse(shlex.split(DENSE + rotary))).positions is None
    both = f"{DENSE} {rotary} --no-position-embedding"
    assert model_of(parse(shlex.split(both))).positions is None
    with pytest.raises(ValueError, match="--no-position-embedding with --position-embedding-type"):
        model_of(parse(shlex.split(f"{DENSE} --no-position-embedding")))


def test_other_refusals_name_their_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without --num-experts"):
        parse(shlex.split(f"{DENSE} --expert-model-parallel-size 2"))
    with pytest.raises(ValueError, match="--num-experts=8: dsx memory plans experts without bias"):
        parse(shlex.split(EXPERTS.replace("--disable-bias-linear", "")))
    with pytest.raises(ValueError, match="-cluster 6 is no multiple of tensor 2 x pipeline 1 x co"):
        read(f"{DENSE} --tensor-model-parallel-size 2 --context-parallel-size 2", tmp_path, 6)
    uneven = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
    with pytest.raises(ValueError, match="write --num-virtual-stages-per-pipeline-rank"):
        read(f"{DENSE} {uneven} --num-layers-per-virtual-pipeline-stage 1", tmp_path)


def test_ranks_of_experts_that_megatrons_flag_alone_tells_are_refused(tmp_path: Path) -> None:
    document = tmp_path / "deepspeed.json"
    read(f"{EXPERTS} --expert-model-parallel-size 2", tmp_path)
    for untold in ({}, {"moe": {}}, {"moe": None}, {"moe": {"layers": 2}}):
        document.write_text(json.dumps(untold))
        with pytest.raises(ValueError, match='is Megatron\'s: .*add "moe": {"ep_size": 2} there'):
            read_model(document, tmp_path / "model.flags", 4)
    document.write_text('{"moe": {"ep_size": 4}}')
    assert read_model(document, tmp_path / "model.flags", 4).cluster.expert == 4
    document.write_text('{"moe": {"ep_size": "4"}}')
    with pytest.raises(ValueError, match="ep_size='4' must be an integer"):
        read_model(document, tmp_path / "model.flags", 4)


def test_experts_lie_on_ranks_of_their_own(tmp_path: Path) -> None:
    """TP 2 and CP 2 with EP 4: the fewest ranks hold each expert once, and dense weights twice."""
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2 --bf16 "
    layout += "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
    files = read(f"{EXPERTS} {layout} --use-distributed-optimizer", tmp_path)
    cluster, model = files.cluster, files.model
    assert (cluster.ranks, cluster.data, cluster.shards) == (4, 1, 2)
    assert (cluster.shards_of_experts, cluster.slices_of_experts) == (1, 1)
    shapes = {p.name: p.shape for p in stage_shapes(model, cluster, Stage())}
    assert sum(p.numel for p in stage_shapes(model, cluster, Stage())) == model.numel
    own = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert shapes[f"{own}.experts_3"] == (32, 64) and f"{own}.experts_4" not in shapes
    assert shapes["decoder.layers.0.mlp.router.weight"] == (8, 64)
    dense, experts = held_on_rank(model, cluster, Stage())
    assert experts == 4 * 2 * 2 * 32 * 64  # layers, experts of a rank, matrices
    found = inner_of(model, cluster, Stage(), files.batch)
    assert found.moments == 8 * (dense // 2 + experts)
    assert found.gradients == 4 * (dense + experts)
    assert model.active_numel == model.numel - 4 * 6 * 2 * 32 * 64
    more = read(f"{EXPERTS} {layout}", tmp_path, 8).cluster
    assert (more.data, more.shards, more.shards_of_experts) == (2, 4, 2)


def test_heads_and_their_norms_have_sizes_of_their_own(tmp_path: Path) -> None:
    model = read(f"{DENSE} --kv-channels 32 --qk-layernorm", tmp_path).model
    shapes = {p.name: p.shape for p in model.stage(Stage())}
    layer = "decoder.layers.3.self_attention."
    assert shapes[f"{layer}linear_qkv.weight"] == (3 * 4 * 32, 64)
    assert shapes[f"{layer}linear_proj.weight"] == (64, 4 * 32)
    assert shapes[f"{layer}k_layernorm.weight"] == (32,)


def test_context_parallelism_cuts_activations(tmp_path: Path) -> None:
    whole, cut = (
        inner_of(f.model, f.cluster, Stage(), f.batch)
        for f in (read(f"{DENSE} --context-parallel-size {n}", tmp_path) for n in (1, 2))
    )
    assert cut.activations * 2 == whole.activations > 0
    assert cut.weights == whole.weights


def test_activations_of_experts_follow_the_tokens() -> None:
    """An expert as wide as the MLP, for each token once, keeps its inside, and the way there."""
    dense = recomputed_activations(8, 1, 16, 1, 1)
    routed = recomputed_activations(8, 1, 16, 1, 1, routed=Routed(1, 4 * 16, 0))
    assert routed - dense == 2 * 8 * (2 * 16 + 4 * 16) - 16 * 8 * 16
    both = megatron(100, True, 2, 7) + megatron(50, True)
    assert (both.weights, both.masters, both.activations) == (300, 400, 7)
