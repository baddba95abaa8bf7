"""What a link has dropped because it does not fit: counted by its reason, said the first times."""

from __future__ import annotations

import logging
from collections import Counter

_MOST_REASONS = 64  # that are told apart
_TOLD = 5  # of a reason: then they are only counted
logger = logging.getLogger(__name__)


class Dropped:
    """`counts` are read by other threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, what: str, who: str) -> None:
        """Count something of somebody's."""
        if what not in self.counts and len(self.counts) >= _MOST_REASONS:
            what = "what does not fit in yet another way"
        self.counts[what] += 1
        if self.counts[what] <= _TOLD:
            logger.warning("dropped: %s, from %s", what, who)
