"""What tells a rank who the members are."""

from __future__ import annotations

from typing import Protocol

from dsx.core.membership import Membership
from dsx.core.transport import PeerLost


class Views(Protocol):
    """Who are members, one membership after another; the same for all ranks of all clusters."""

    def next(self, epoch: int, seconds: float) -> Membership | None:
        """Return the newest membership if it is later than `epoch`; wait for it so long at most.

        PeerLost says why there will be none.
        """
        ...

    def report(self, lost: PeerLost) -> None:
        """Tell that this rank has lost its connection to another cluster. Does not wait."""
        ...

    def close(self) -> None:
        """End a wait."""
        ...
