"""Fully sharded data parallelism in a tree's unmodified script: `--megatron-lm PATH -m slow`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.launch import test_megatron_lm, test_megatron_synchronous
from tests.launch.test_megatron_lm import (
    MODEL,
    SAVED_AT,
    STEPS,
    logged,
    pretrain,
    require_equal_anchors,
)
from tests.launch.test_megatron_synchronous import plain

tree = test_megatron_lm.tree  # the fixture
LATE = shlex.split("--dsx-preset diloco --dsx-schedule-interval 100")
KINDS = {
    "fsdp2": "--use-torch-fsdp2 --untie-embeddings-and-output-weights",
    "megatron": """
        --use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor
        --data-parallel-sharding-strategy optim_grads_params --no-gradient-reduce-div-fusion
    """,
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_train_and_resume(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As plain Megatron where no outer step comes; in two clusters, and resumed to the bit."""
    environment = test_megatron_lm.environment

    def with_connections(at: Path) -> dict[str, str]:  # with one Megatron refuses both
        return {**environment(at), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}

    for module in (test_megatron_lm, test_megatron_synchronous):
        monkeypatch.setattr(module, "MODEL", [*MODEL, *shlex.split(KINDS[kind])])
        monkeypatch.setattr(module, "environment", with_connections)
    few = ["--train-iters", "4"]
    whole = plain(tree, tmp_path / "plain", *few, ranks=2)
    with monkeypatch.context() as alone:
        alone.setattr(test_megatron_lm, "DSX", LATE)
        (one,) = pretrain(tree, tmp_path / "one", *few, clusters=1)
    for what in ("lm loss", "grad norm"):
        assert logged(one, what) == logged(whole, what) and len(logged(whole, what)) == 4

    arguments = ["--bf16", "--train-iters", str(STEPS)]
    if kind == "fsdp2":  # core_v0.16.1 does not save a bf16 optimizer under it
        texts = pretrain(tree, tmp_path / "logs", *arguments)
        assert all(len(logged(text, "lm loss")) == STEPS for text in texts)
        return
    arguments += ["--save", str(tmp_path / "{cluster_id}"), "--save-interval", str(SAVED_AT)]
    texts = pretrain(tree, tmp_path / "logs", *arguments)
    require_equal_anchors(tmp_path, SAVED_AT)
    require_equal_anchors(tmp_path, STEPS)
    for cluster in range(2):
        latest = tmp_path / str(cluster) / "latest_checkpointed_iteration.txt"
        latest.write_text(str(SAVED_AT))
    load = ["--load", str(tmp_path / "{cluster_id}")]
    resumed = pretrain(tree, tmp_path / "resumed", *arguments, *load)
    for before, after in zip(texts, resumed, strict=True):
        norms = logged(before, "grad norm")
        assert logged(after, "grad norm") == {i: norms[i] for i in range(SAVED_AT + 1, STEPS + 1)}
    assert logged(texts[0], "lm loss")[1] != logged(texts[1], "lm loss")[1]  # data of their own
