"""A byte-level tokenizer: 256 bytes and one end-of-document id.

Token i < 256 is the byte i of the UTF-8 text, token 256 ends a document, so any text round-trips
and there is no vocabulary file to ship. The vocabulary has 257 entries; a model may pad its
embedding (to 384 for tensor parallelism, say), the ids above 256 are then never seen.

Megatron's NullTokenizer has the same layout: `--tokenizer-type NullTokenizer --vocab-size 256`
gives 257 entries with end-of-document 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens; `eod` closes a document."""

    name: str = "byte"
    vocab_size: int = 257
    eod: int = 256

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """Return the tokens of `text`, uint16 [num_bytes], without an end-of-document id."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

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
