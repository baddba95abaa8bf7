"""How large a message, a text and what a log keeps may be (P6); all senders keep to it.

A log's state and all of its entries fit one message, because a copy and the first append under a
ballot bring them whole (S4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Characters:
    """At most so many, in an annotation of a text."""

    most: int


MESSAGE_BYTES = 1 << 22  # encoded
KEPT_BYTES = 1 << 18  # of entries that somebody has not applied; beyond that, he joins again
PENDING_BYTES = 1 << 17  # of entries that a quorum does not hold; beyond that, nothing is appended
SAID_BYTES = 1 << 17  # of all keys and values that are remembered
COUNT = 1 << 16  # items of one list
LANES = 2048
CLUSTERS = 256  # that have a key
SAYINGS_PER_STATUS = 16
LASTS = 1 << 20  # entries for which something said is remembered, at most, if not for good
INTEGER = 1 << 62  # that is read; what is made from it is larger by little, and can be written

Lane = Annotated[str, Characters(100)]  # a stage's fragment, as "stage 1/fragment 3"
Digest = Annotated[str, Characters(64)]
Key = Annotated[str, Characters(200)]
Value = Annotated[str, Characters(2000)]
