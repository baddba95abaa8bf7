"""Local data and models for the rows: text of Python's standard library, and a GPT-2 of two layers.

Made once per folder, in a minute at most, and with nothing from a network. Lines of the text are
all different, so that two samples that are equal have been read twice.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILES, _VOCABULARY, _LAYERS, _WIDTH, _LENGTH = 80, 512, 2, 64, 128
_HELD_OUT = 10  # one line in so many
_SAMPLES = 1200
_PAIRS = 7680
_WORDS, _BLOCK = 500, 35
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
_CARD = """\
---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.jsonl
  - split: validation
    path: mrpc/validation.jsonl
---
"""


def prepare(what: str, folder: Path) -> None:
    """Make what a row needs in a folder, unless it is there; KeyError for what is unknown."""
    done = folder / f".{what}"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _MAKERS[what](folder)
        done.touch()


def texts() -> tuple[list[str], list[str]]:
    """Return different lines of the standard library, for training and held out."""
    every_file = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = [one for one in every_file if not one.name.startswith("_sysconfigdata")][:_FILES]
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


def _pairs(folder: Path) -> None:
    """GLUE's MRPC by another content, a BERT for it, and its metric, where scripts ask for them.

    Pairs of lines; one of them is the other one in capitals, or it is another line.
    """
    of_letters = ({re.sub(r"\s", "", line): line for line in lines} for lines in texts())
    train, held_out = (list(lines.values()) for lines in of_letters)
    random_ = random.Random(0)
    glue = folder / "nyu-mll" / "glue"
    (glue / "mrpc").mkdir(parents=True, exist_ok=True)
    for name, lines, count in (("train", train, _PAIRS), ("validation", held_out, 512)):
        rows = [_pair(lines, number, random_) for number in range(count)]
        (glue / "mrpc" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (glue / "README.md").write_text(_CARD)
    (folder / "glue").mkdir(exist_ok=True)
    (folder / "glue" / "glue.py").write_text(_METRIC)
    _bert(folder / "bert-base-cased", [*train, *map(str.upper, train)])


def _pair(lines: list[str], number: int, random_: random.Random) -> dict[str, Any]:
    first, label = lines[number], random_.randrange(2)
    other = first.upper() if label else random_.choice(lines)
    return {"sentence1": first, "sentence2": other, "label": label, "idx": number}


def _bert(folder: Path, lines: list[str]) -> None:
    from tokenizers import BertWordPieceTokenizer  # pyright: ignore
    from transformers import (  # pyright: ignore
        BertConfig,
        BertForSequenceClassification,
        BertTokenizerFast,
        set_seed,
    )

    trained = BertWordPieceTokenizer(lowercase=False)
    trained.train_from_iterator(lines, vocab_size=2 * _VOCABULARY, show_progress=False)
    tokenizer = BertTokenizerFast(
        tokenizer_object=trained._tokenizer, do_lower_case=False, model_max_length=_LENGTH
    )
    tokenizer.save_pretrained(str(folder))
    set_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), num_hidden_layers=_LAYERS, num_attention_heads=2,
        hidden_size=2 * _WIDTH, intermediate_size=8 * _WIDTH, max_position_embeddings=_LENGTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.002,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(str(folder))


def _words(folder: Path) -> None:
    """A text of words with blanks between them, in the place of Lightning's WikiText-2.

    A word that is not among the first ones is written as its letters; of blocks of so many words as
    Lightning takes for a sample no two are alike.
    """
    lines = [[m[0] for m in re.finditer(r"\w+|([^\w\s])\1*", line)] for line in texts()[0]]
    known = {word for word, _ in Counter(w for line in lines for w in line).most_common(_WORDS)}
    words = [w for line in lines for word in [*line, "\n"] for w in _spelled(word, known)]
    blocks = (tuple(words[i : i + _BLOCK]) for i in range(0, len(words), _BLOCK))
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "wikitext-2.txt").write_text(
        " ".join(word for block in dict.fromkeys(blocks) for word in block)
    )


def _spelled(word: str, known: set[str]) -> list[str]:
    return list(word) if re.fullmatch(r"\w+", word) and word not in known else [word]


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
    "pairs": _pairs,
    "words": _words,
    "tokens": _tokens,
    "documents": _documents,
    "nothing": lambda folder: None,
}
