"""Unmodified `pretrain_gpt.py` with `--async-save`: `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.launch import test_megatron_lm
from tests.launch.test_megatron_lm import (
    PIPELINE,
    SAVED_AT,
    STEPS,
    logged,
    pretrain,
    require_equal_anchors,
)
from tests.launch.test_megatron_synchronous import differences, held

tree = test_megatron_lm.tree  # the fixture
BESIDE = shlex.split("--async-save --use-persistent-ckpt-worker")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_written_beside_training_is_the_same(tree: Path, tmp_path: Path) -> None:
    """And so is a run that goes on from it, with a fragment under way."""
    given = [*PIPELINE, "--ckpt-format", "torch_dist", "--train-iters", str(STEPS)]
    given += ["--save-interval", str(SAVED_AT)]
    at_once, beside = tmp_path / "at_once", tmp_path / "beside"
    for base, more in ((at_once, []), (beside, BESIDE)):
        save = ["--save", str(base / "{cluster_id}")]
        texts = pretrain(tree, tmp_path / f"logs_{base.name}", *given, *more, *save)
    for cluster, text in enumerate(texts):
        assert text.count("scheduled an async checkpoint save at iteration") == 2
        for iteration in (SAVED_AT, STEPS):
            one, other = (held(base / str(cluster), iteration) for base in (at_once, beside))
            assert differences(one, other) == []
        latest = beside / str(cluster) / "latest_checkpointed_iteration.txt"
        assert latest.read_text() == str(STEPS)
        latest.write_text(str(SAVED_AT))  # as where the last one has not been completed
    require_equal_anchors(beside, SAVED_AT)
    load = ["--load", str(beside / "{cluster_id}"), "--save", str(beside / "{cluster_id}")]
    resumed = pretrain(tree, tmp_path / "resumed", *given, *BESIDE, *load)
    for whole, part in zip(texts, resumed, strict=True):
        assert f"goes on from iteration {SAVED_AT}" in part
        norms = logged(whole, "grad norm")
        assert logged(part, "grad norm") == {i: norms[i] for i in range(SAVED_AT + 1, STEPS + 1)}
    require_equal_anchors(beside, STEPS)
