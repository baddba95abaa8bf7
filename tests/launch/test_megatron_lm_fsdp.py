"""Fully sharded data parallelism in a tree's unmodified script: `--megatron-lm PATH -m slow`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.launch import test_megatron_lm, test_megatron_synchronous
from tests.launch.test_megatron_lm import (
    MODEL,
    STEPS,
    logged,
    pretrain,
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
def test_shards_train(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As plain Megatron where no outer step comes; and in two clusters."""
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

    # core_v0.16.1 does not save on a CPU: docs/megatron.md
    texts = pretrain(tree, tmp_path / "logs", "--bf16", "--train-iters", str(STEPS))
    assert all(len(logged(text, "lm loss")) == STEPS for text in texts)
    assert logged(texts[0], "lm loss")[1] != logged(texts[1], "lm loss")[1]  # data of their own
