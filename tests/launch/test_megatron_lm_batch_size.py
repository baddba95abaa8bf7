"""Unmodified `pretrain_gpt.py` with a batch that grows: `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.launch import test_megatron_lm, test_megatron_synchronous
from tests.launch.test_megatron_lm import MODEL, logged, pretrain, require_equal_anchors
from tests.launch.test_megatron_synchronous import counted, plain

tree = test_megatron_lm.tree  # the fixture
STEPS, SAMPLES = 12, 72
SAVED_AT = 5  # a fragment is under way, and clusters together have read what the batch grows at
SIZES = [4, 4, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8]  # by step, in every cluster
LATE = shlex.split("--dsx-preset diloco --dsx-schedule-interval 100")


def growth(tree: Path, over: int = 23) -> list[str]:
    """Return the tree's own flags for batches of 4, and of 8 behind so many samples and one."""
    arguments = (tree / "megatron/training/arguments.py").read_text()
    is_ramp = "step_batch_size_schedule" not in arguments
    ramp = f"--rampup-batch-size 4 4 {over} --global-batch-size 8"
    return shlex.split(ramp if is_ramp else f"--step-batch-size-schedule '0:4 {16 * over + 1}:8'")


def of_model() -> list[str]:
    at = MODEL.index("--global-batch-size")
    return [*MODEL[:at], *MODEL[at + 2 :], "--train-samples", str(SAMPLES)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_cluster_trains_as_plain_megatron(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: no outer step comes, which with one cluster changes weights, too."""
    monkeypatch.setattr(test_megatron_lm, "DSX", LATE)
    for module in (test_megatron_lm, test_megatron_synchronous):
        monkeypatch.setattr(module, "MODEL", of_model())
    whole = plain(tree, tmp_path / "plain", *growth(tree))
    (one,) = pretrain(tree, tmp_path / "one", *growth(tree), clusters=1, ranks=1)
    for what in ("lm loss", "grad norm"):
        assert logged(one, what) == logged(whole, what)
    assert counted(one) == counted(whole)
    assert counted(one) == {i + 1: sum(SIZES[: i + 1]) for i in range(STEPS)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clusters_grow_at_one_step_and_resume(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded names twice the samples: the batch is that of a cluster's own count."""
    monkeypatch.setattr(test_megatron_lm, "MODEL", of_model())
    arguments = [
        *growth(tree),
        "--save-interval",
        str(SAVED_AT),
        "--save",
        str(tmp_path / "{cluster_id}"),
        "--bf16",
    ]
    texts = pretrain(tree, tmp_path / "logs", *arguments, ranks=1)
    for text in texts:
        assert counted(text) == {i + 1: sum(SIZES[: i + 1]) for i in range(STEPS)}
        assert re.search(r"cluster reads part \d; 72 samples", text)
    for iteration in (SAVED_AT, 6, STEPS):  # 6: as it grows, Megatron saves
        require_equal_anchors(tmp_path, iteration)
    for cluster in range(2):
        latest = tmp_path / str(cluster) / "latest_checkpointed_iteration.txt"
        latest.write_text(str(SAVED_AT))
    load = ["--load", str(tmp_path / "{cluster_id}")]
    resumed = pretrain(tree, tmp_path / "resumed", *arguments, *load, ranks=1)
    for before, after in zip(texts, resumed, strict=True):
        assert f"goes on from iteration {SAVED_AT}" in after
        assert counted(after) == {i: n for i, n in counted(before).items() if i > SAVED_AT}
        norms = logged(before, "grad norm")
        assert logged(after, "grad norm") == {i: norms[i] for i in counted(after)}
    require_equal_anchors(tmp_path, STEPS)
