"""How patient the protocol is, in ticks; whoever drives it says how long a tick is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Safety rests on none of these."""

    patience: int = 20  # of silence after which a linked process counts as gone
    candidacy: int = 24  # of one who is promised to and does not lead yet; then others may stand
    stagger: int = 3  # between the first candidate and the next
    again: int = 4  # until a candidate asks again: before the one behind the next stands
    retry: int = 12  # until a joiner tries again
    doubt: int = 8  # in which one that two do not reach alike may turn out to be gone
    hopeless: int = 20  # in which a view under way has no quorum of its own, and is given up then
    near: int = 16  # entries: commits wait for a joiner that is as near as that
