"""Tokenizers: bytes, or what a Hugging Face folder holds.

The byte tokenizer has 256 bytes and one end-of-document id.
Token i < 256 is the byte i of the UTF-8 text, token 256 ends a document, so any text round-trips
and there is no vocabulary file to ship. The vocabulary has 257 entries; a model may pad its
embedding (to 384 for tensor parallelism, say), the ids above 256 are then never seen.

Megatron's NullTokenizer has the same layout: `--tokenizer-type NullTokenizer --vocab-size 256`
gives 257 entries with end-of-document 256.

A Hugging Face tokenizer is its tokenizer.json, which the library `tokenizers` reads; documents end
with its end-of-sequence token, and it adds no other special ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]
_FILE, _SETTINGS = "tokenizer.json", ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """What a dataset is built with; `name` tells tokenizers apart that give other tokens."""

    @property
    def name(self) -> str:
        """The tokenizer, with a hash of what it was read from, if anything."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, [num_tokens], without an end-of-document id."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens; `eod` closes a document."""

    name: str = "byte"
    vocab_size: int = 257
    eod: int = 256

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """Return the tokens of `text`, uint16 [num_bytes], without an end-of-document id."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, [num_bytes], without an end-of-document id."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text of `tokens`: end-of-document ids are dropped, cut characters replaced.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = np.asarray(tokens, dtype=np.int64).ravel()
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"token {outside[0]} is outside the vocabulary 0..{self.vocab_size - 1}; "
                "mask a padded model's extra logits before sampling"
            )
        return ids[ids != self.eod].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder; the library encodes on all cores at once."""

    def __init__(self, folder: Path) -> None:
        """Read it; ValueError for a folder without one, ModuleNotFoundError without the library."""
        file = folder / _FILE if folder.is_dir() else folder
        if not file.is_file():
            raise ValueError(
                f"--tokenizer {folder} holds no {_FILE}; give a folder that has one: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it"
            )
        content = file.read_bytes()
        try:
            self._tokenizer = _import_tokenizers().Tokenizer.from_buffer(content)
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}; save the tokenizer anew") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eod = _end_of_document(file.parent, vocabulary)
        self.vocab_size = 1 + max(vocabulary.values())
        self.name = f"{file.parent.resolve().name} {sha256(content).hexdigest()[:16]}"

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, int64 [num_tokens], without special ones."""
        found: Any = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]


def _end_of_document(folder: Path, vocabulary: dict[str, int]) -> int:
    """Return the id of the end-of-sequence token that the files beside a tokenizer name."""
    for name in _SETTINGS:
        path = folder / name
        known: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        token = known.get("eos_token") if isinstance(known, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"{folder} names no eos_token that its tokenizer knows, and documents have to end with "
        f"one: set tokenizer.eos_token and save it again, so that {_SETTINGS[0]} has it"
    )


def _import_tokenizers() -> Any:
    from importlib import import_module

    try:
        return import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a Hugging Face tokenizer needs tokenizers: pip install "dsx-train[data]"',
            name=error.name,
        ) from error
