"""What outer training may use of a host, beside memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsx.core.cores import CodingCores


@dataclass(frozen=True)
class Resources:
    """Of one rank. `folder` takes outer state in files, `cores` bound its coding threads; None:
    no files, and no bound.
    """

    folder: Path | None = None
    cores: CodingCores | None = None
