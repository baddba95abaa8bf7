"""Whether enough clusters are left to go on; if not, for whom this one waits, and how long.

Those who are gone may be reached again, or show by a restart that their old process has ended: the
log knows (membership/quorum.py). Until then nothing is averaged, and nothing ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsx.comm.views import Waits
from dsx.core.leaving import LOST, Reason
from dsx.core.transport import PeerPreempted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Waiting:
    """For which clusters, each with the reason, and until when by time.monotonic()."""

    gone: Mapping[int, str]
    members: tuple[int, ...]
    seconds: float
    since: float = field(default_factory=time.monotonic)

    @property
    def left_seconds(self) -> float:
        """How long it may last still."""
        return max(self.since + self.seconds - time.monotonic(), 0.0)

    def error(self) -> PeerPreempted:
        """Return what has happened, as that for which this cluster ends."""
        whys = "; ".join(f"cluster {id}: {why}" for id, why in self.gone.items())
        error = PeerPreempted(
            f"{are([*self.gone])} lost ({whys}), and no more than half of "
            f"{listed(self.members)} are left to go on alone: the others could, too"
        )
        gone = tuple(self.gone)
        error.reason, error.cluster, error.gone = Reason(gone[0], LOST), gone[0], gone
        return error


class Quorum:
    """Of one cluster; looked after by its clerk's thread, and read by others."""

    def __init__(self, tell: Callable[[Waits], object]) -> None:
        """`tell` hears whom this cluster waits for, each time that changes."""
        self._tell = tell
        self.seconds: Callable[[], float] = lambda: 0.0  # how long it may wait; 0: it ends at once
        self.waiting: Waiting | None = None

    def look(
        self, waits_for: Sequence[int], gone: Mapping[int, str], members: Sequence[int]
    ) -> PeerPreempted | None:
        """Take who is not reached, of the `members`; return why this cluster ends, if it does."""
        lost = {id: gone[id] for id in waits_for if id in gone}
        waiting = self.waiting
        if waiting is None:
            if not lost:
                return None
            waiting = Waiting(lost, tuple(members), self.seconds())
            if not waiting.seconds:
                return waiting.error()
            logger.warning("%s", waiting.error())
            self._wait(waiting)
        elif not waits_for:
            self.waiting = None
            self._tell(Waits())
            logger.warning(
                "enough clusters are there again: going on after %.1f s",
                time.monotonic() - waiting.since,
            )
        elif lost and lost.keys() != waiting.gone.keys():
            self._wait(replace(waiting, gone=lost))
        elif not self.seconds():  # this cluster has come to where it cannot wait
            return waiting.error()
        elif not waiting.left_seconds:
            logger.error(
                "nobody has come back within %g s (clusters.quorum_wait_seconds)", waiting.seconds
            )
            return waiting.error()
        return None

    def facts(self) -> dict[str, Any]:
        """Return what a member's tool is told of it; any thread."""
        waiting = self.waiting
        if waiting is None:
            return {}
        return {"waiting": {"clusters": [*waiting.gone], "seconds": round(waiting.left_seconds, 1)}}

    def _wait(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self._tell(Waits(tuple(waiting.gone)))


def listed(clusters: Sequence[int]) -> str:
    """Return what messages call some clusters."""
    named = ", ".join(map(str, clusters))
    return f"cluster {named}" if len(clusters) == 1 else f"clusters {named}"


def are(clusters: Sequence[int]) -> str:
    """Return the beginning of a sentence about some clusters."""
    return f"{listed(clusters)} {'is' if len(clusters) == 1 else 'are'}"
