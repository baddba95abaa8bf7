"""Fully sharded data parallelism in a tree's unmodified script: `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.launch import test_megatron_lm, test_megatron_synchronous
from tests.launch.test_megatron_lm import (
    MODEL,
    SAVED_AT,
    STEPS,
    anchors,
    logged,
    pretrain,
    require_equal_anchors,
)
from tests.launch.test_megatron_synchronous import differences, held, plain

tree = test_megatron_lm.tree  # the fixture
LATE = shlex.split("--dsx-preset diloco --dsx-schedule-interval 100")
OF_TORCH = "--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format"
OF_MEGATRON = """
    --use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor
    --data-parallel-sharding-strategy optim_grads_params --no-gradient-reduce-div-fusion
"""
SLICES = "--tensor-model-parallel-size 2"
MIXTURE = """
    --num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
"""  # with slices Megatron asks for sequence parallelism, and that for a norm of apex or another
KINDS = {  # arguments, and a cluster's ranks
    "fsdp2": (f"{OF_TORCH} torch_dcp", 2),
    "megatron": (OF_MEGATRON, 2),
    "megatron of slices": (f"{OF_MEGATRON} {SLICES}", 4),
    "megatron of experts": (f"{OF_MEGATRON} {MIXTURE}", 4),
    "fsdp2 of slices": (f"{OF_TORCH} torch_dist {SLICES}", 4),  # of which nothing is saved
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_train(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As plain Megatron where no outer step comes; and in two clusters, resumed to the bit."""
    environment = test_megatron_lm.environment
    given, ranks = KINDS[kind]

    def with_connections(at: Path) -> dict[str, str]:
        # with one Megatron refuses both
        return {**environment(at), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}

    for module in (test_megatron_lm, test_megatron_synchronous):
        monkeypatch.setattr(module, "MODEL", [*MODEL, *shlex.split(given)])
        monkeypatch.setattr(module, "environment", with_connections)
    few = ["--train-iters", "4"]
    whole = plain(tree, tmp_path / "plain", *few, ranks=ranks)
    with monkeypatch.context() as alone:
        alone.setattr(test_megatron_lm, "DSX", LATE)
        (one,) = pretrain(tree, tmp_path / "one", *few, clusters=1, ranks=ranks)
    for what in ("lm loss", "grad norm"):
        assert logged(one, what) == logged(whole, what) and len(logged(whole, what)) == 4
    if kind == "fsdp2 of slices":
        texts = pretrain(tree, tmp_path / "logs", "--train-iters", str(STEPS), ranks=ranks)
        assert all("finished after" in text for text in texts)
        assert all(len(logged(text, "lm loss")) == STEPS for text in texts)
        return

    arguments = ["--bf16", "--train-iters", str(STEPS), "--save-interval", str(SAVED_AT)]
    save = ["--save", str(tmp_path / "{cluster_id}")]
    texts = pretrain(tree, tmp_path / "logs", *arguments, *save, ranks=ranks)
    assert all(len(logged(text, "lm loss")) == STEPS for text in texts)
    assert logged(texts[0], "lm loss")[1] != logged(texts[1], "lm loss")[1]  # data of their own
    for cluster in range(2):
        latest = tmp_path / str(cluster) / "latest_checkpointed_iteration.txt"
        latest.write_text(str(SAVED_AT))
    whole_run, load = tmp_path / "whole", ["--load", str(tmp_path / "{cluster_id}")]
    for cluster in range(2):
        shutil.copytree(tmp_path / str(cluster), whole_run / str(cluster))
    resumed = pretrain(tree, tmp_path / "resumed", *arguments, *save, *load, ranks=ranks)
    for cluster, (whole, part) in enumerate(zip(texts, resumed, strict=True)):
        before, after = logged(whole, "grad norm"), logged(part, "grad norm")
        assert sorted(after) == list(range(SAVED_AT + 1, STEPS + 1))
        assert after == {i: before[i] for i in after}
        one, other = (held(base / str(cluster), STEPS) for base in (whole_run, tmp_path))
        # of which Megatron does not load how many there were in these forms
        assert {*differences(one, other)} <= {"dist/num_floating_point_operations_so_far"}
    require_equal_anchors(tmp_path, STEPS)
    for first, second in zip(anchors(whole_run, STEPS), anchors(tmp_path, STEPS), strict=True):
        assert first and all(first[name].equal(second[name]) for name in first)
