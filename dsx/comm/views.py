"""What tells a rank who the members are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dsx.core.membership import Membership
from dsx.core.transport import PeerLost


@dataclass(frozen=True)
class Waits:
    """This cluster waits for `gone`, without whom too few are left to go on; for nobody if empty.

    Nothing ends meanwhile: what is under way goes on with them, or is averaged again without.
    """

    gone: tuple[int, ...] = ()


class Views(Protocol):
    """Who are members, one membership after another; the same for all ranks of all clusters."""

    def next(self, epoch: int, seconds: float) -> Membership | None:
        """Return the newest membership if it is later than `epoch`; wait for it so long at most.

        PeerLost says why there will be none.
        """
        ...

    @property
    def waits(self) -> bool:
        """Whether this cluster waits for others, as of the last `next`: no deadline passes."""
        ...

    def report(self, lost: PeerLost) -> None:
        """Tell that this rank has lost its connection to another cluster. Does not wait."""
        ...

    def close(self) -> None:
        """End a wait."""
        ...
