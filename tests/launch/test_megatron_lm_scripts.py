"""Other scripts of a tree than `pretrain_gpt.py`, unmodified: `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from tests.data.test_windows import write_indexed
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
WORDS = 60
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OF_TOKENS = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4222")
LATE = shlex.split("--dsx-preset diloco --dsx-schedule-interval 100")
OF_STATES = """
    --spec tests.engines.megatron_hybrid stack_spec
    --mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2
"""
MIXTURE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
SCRIPTS = {  # what is given of a model, and its stages
    "pretrain_bert.py": ("--spec local --bert-embedder-type megatron", 2),
    "pretrain_t5.py": ("--decoder-num-layers 4 --decoder-seq-length 16 --vocab-extra-ids 20", 1),
    "pretrain_vlm.py": ("--img-h 28 --img-w 28 --patch-dim 14 --ckpt-format torch", 1),
    "pretrain_mamba.py": (f"--hybrid-override-pattern M*-M {OF_STATES}", 2),
    "pretrain_hybrid.py": (f"--hybrid-layer-pattern M*-M {OF_STATES}", 2),
    "pretrain_hybrid.py of experts": (f"--hybrid-layer-pattern M*E|M- {MIXTURE} {OF_STATES}", 2),
}
OF_SENTENCES = ("pretrain_bert.py", "pretrain_t5.py")


def of_parts(words: list[str]) -> list[str]:
    """Return a model's arguments for an encoder and a decoder, each with sizes of its own."""
    text = " ".join(words).replace("--num-layers", "--encoder-num-layers")
    return text.replace("--seq-length", "--encoder-seq-length").split()


def of_sentences(at: Path) -> list[str]:
    """Return the arguments of data of masked words, and of the words' vocabulary, made in `at`."""
    words = [f"w{index}" for index in range(WORDS)]
    (at / "vocab.txt").write_text("\n".join([*SPECIAL, *words]) + "\n")
    drawn = random.Random(0)
    first, last = len(SPECIAL), len(SPECIAL) + WORDS - 1
    sentences = [[drawn.randint(first, last) for _ in range(5)] for _ in range(800)]
    write_indexed(at / "data", sentences, sentences=4)
    model = [word for word in MODEL if word not in OF_TOKENS]
    return [
        *model, "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", f"{at}/vocab.txt",
        "--legacy-tokenizer", "--data-path", f"{at}/data", "--data-cache-path", f"{at}/cache",
        "--mask-prob", "0.3", "--split", "100,0,0",  # held out are no samples, and not an empty set
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_another_script_trains_and_resumes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As plain Megatron where no outer step comes; two clusters alike, and resumed to the bit."""
    script = kind.split()[0]
    if not (tree / script).exists():
        pytest.skip(f"this tree has no {script}")
    given, stages = SCRIPTS[kind]
    model = of_sentences(tmp_path) if script in OF_SENTENCES else MODEL
    model = [*model, *shlex.split(given)]
    if script == "pretrain_t5.py":
        model = of_parts(model)
    for module in (test_megatron_lm, test_megatron_synchronous):
        monkeypatch.setattr(module, "MODEL", model)
    train_and_resume(tree, tmp_path, monkeypatch, script, stages)


def train_and_resume(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, stages: int
) -> None:
    """Train the script's model as plain Megatron does, and in clusters; resume from the middle."""
    stage = ["--pipeline-model-parallel-size", str(stages)]
    few = ["--train-iters", "4", *stage]
    whole = plain(tree, tmp_path / "plain", *few, script=script, ranks=stages)
    with monkeypatch.context() as alone:
        alone.setattr(test_megatron_lm, "DSX", LATE)
        (one,) = pretrain(
            tree, tmp_path / "one", *few, clusters=1, ranks=stages, script=script
        )  # fmt: skip
    for what in ("lm loss", "grad norm"):
        assert logged(one, what) == logged(whole, what) and len(logged(whole, what)) == 4

    save = ["--save", str(tmp_path / "{cluster_id}"), "--save-interval", str(SAVED_AT)]
    arguments = ["--bf16", "--train-iters", str(STEPS), *stage, *save]
    texts = pretrain(tree, tmp_path / "logs", *arguments, ranks=stages, script=script)
    require_equal_anchors(tmp_path, SAVED_AT)
    require_equal_anchors(tmp_path, STEPS)
    for cluster in range(2):
        latest = tmp_path / str(cluster) / "latest_checkpointed_iteration.txt"
        latest.write_text(str(SAVED_AT))
    load = ["--load", str(tmp_path / "{cluster_id}")]
    resumed = pretrain(tree, tmp_path / "resumed", *arguments, *load, ranks=stages, script=script)
    for before, after in zip(texts, resumed, strict=True):
        norms = logged(before, "grad norm")
        assert logged(after, "grad norm") == {i: norms[i] for i in range(SAVED_AT + 1, STEPS + 1)}
    assert logged(texts[0], "lm loss")[1] != logged(texts[1], "lm loss")[1]  # data of their own
