"""Unmodified `pretrain_gpt.py` with `--mtp-num-layers`: `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.launch import test_megatron_lm, test_megatron_synchronous
from tests.launch.test_megatron_lm import MODEL, pretrain
from tests.launch.test_megatron_lm_scripts import train_and_resume

tree = test_megatron_lm.tree  # the fixture
PREDICTS = shlex.split("--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion")
UNTIED = "--untie-embeddings-and-output-weights"
STAGES = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stages", [1, 2])
def test_it_trains_and_resumes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """A copy of the embedding that did not follow would be another one behind a resume."""
    model = [*MODEL, *PREDICTS, *([UNTIED] if stages > 1 else [])]
    for module in (test_megatron_lm, test_megatron_synchronous):
        monkeypatch.setattr(module, "MODEL", model)
    train_and_resume(tree, tmp_path, monkeypatch, "pretrain_gpt.py", stages)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tied_head_beside_it_is_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_megatron_lm, "MODEL", [*MODEL, *PREDICTS])
    texts = pretrain(tree, tmp_path, *STAGES, "--train-iters", "2", must_fail=True)
    assert any("does not serve mtp_num_layers over 2 pipeline stages" in text for text in texts)
