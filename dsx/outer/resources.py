"""What outer training may use of a host, beside memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from dsx.core.cores import CodingCores, Turn
from dsx.core.side_stream import SideStream


@dataclass(frozen=True)
class Resources:
    """Of one rank. `folder` takes outer state in files, `cores` bound its coding threads, on `side`
    factors are made; None: no files, no bound, and on the host.
    """

    folder: Path | None = None
    cores: CodingCores | None = None
    side: SideStream | None = None

    @property
    def turn(self) -> Turn:
        """Return what is held while something is coded."""
        return nullcontext if self.cores is None else self.cores.turn
