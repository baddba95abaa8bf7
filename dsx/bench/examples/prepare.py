"""Local data and models for the rows: text of Python's standard library, and a GPT-2 of two layers.

Made once per folder, in a minute at most, and with nothing from a network. Lines of the text are
all different, so that two samples that are equal have been read twice.
"""

from __future__ import annotations

import json
import pickle
import sysconfig
from collections.abc import Callable
from pathlib import Path

_FILES, _VOCABULARY, _LAYERS, _WIDTH, _LENGTH = 80, 512, 2, 64, 128
_HELD_OUT = 10  # one line in so many
_SAMPLES = 1200
_METRIC = '''\
"""Accuracy, under the name by which scripts ask the Hugging Face hub for it."""

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references):
        same = sum(int(p == r) for p, r in zip(predictions, references))
        return {"accuracy": same / max(1, len(references))}
'''


def prepare(what: str, folder: Path) -> None:
    """Make what a row needs in a folder, unless it is there; KeyError for what is unknown."""
    done = folder / f".{what}"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _MAKERS[what](folder)
        done.touch()


def texts() -> tuple[list[str], list[str]]:
    """Return different lines of the standard library, for training and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_FILES]
    lines: dict[str, None] = {}
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            if len(line.strip()) > 20:
                lines.setdefault(line)
    every = list(lines)
    train = [line for number, line in enumerate(every) if number % _HELD_OUT]
    return train, every[::_HELD_OUT]


def _language_model(folder: Path) -> None:
    """Text files, JSON lines of samples, a tokenizer, a GPT-2 with weights, and a metric."""
    train, held_out = texts()
    (folder / "train.txt").write_text("\n".join(train[:12_000]) + "\n")
    (folder / "validation.txt").write_text("\n".join(held_out[:1_000]) + "\n")
    (folder / "sft").mkdir(exist_ok=True)
    for name, lines in (("train", train[:_SAMPLES]), ("test", held_out[:64])):
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / "sft" / f"{name}.jsonl").write_text(rows)
    _model(folder / "gpt2", train)
    (folder / "accuracy").mkdir(exist_ok=True)
    (folder / "accuracy" / "accuracy.py").write_text(_METRIC)


def _model(folder: Path, lines: list[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer  # pyright: ignore
    from transformers import (  # pyright: ignore
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
        set_seed,
    )

    trained = ByteLevelBPETokenizer()
    end = "<|endoftext|>"
    trained.train_from_iterator(
        lines, vocab_size=_VOCABULARY, show_progress=False, special_tokens=[end]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=end, pad_token=end, bos_token=end
    )
    tokenizer.save_pretrained(str(folder))
    set_seed(0)
    config = GPT2Config(
        vocab_size=_VOCABULARY, n_layer=_LAYERS, n_head=2, n_embd=_WIDTH, n_positions=_LENGTH,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(str(folder))


def _tokens(folder: Path) -> None:
    """Bytes as tokens, in the files of nanoGPT's data folders: one of each cluster, and of all."""
    import numpy as np

    train, held_out = texts()
    half = len(train) // 2
    for name, lines in (("0", train[:half]), ("1", train[half:]), ("all", train)):
        at = folder / f"tokens_{name}"
        at.mkdir(exist_ok=True)
        for part, some in (("train", lines), ("val", held_out)):
            data = "\n".join(some).encode()
            np.frombuffer(data, dtype=np.uint8).astype(np.uint16).tofile(at / f"{part}.bin")
        (at / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def _documents(folder: Path) -> None:
    """JSON lines of documents, as torchtitan reads c4: of each cluster, and of all."""
    train, _ = texts()
    half = len(train) // 2
    for name, lines in (("0", train[:half]), ("1", train[half:]), ("all", train)):
        at = folder / f"documents_{name}"
        at.mkdir(exist_ok=True)
        parts = ("\n".join(lines[i : i + 8]) for i in range(0, len(lines), 8))
        (at / "train.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in parts))


_MAKERS: dict[str, Callable[[Path], None]] = {
    "language_model": _language_model,
    "tokens": _tokens,
    "documents": _documents,
    "nothing": lambda folder: None,
}
