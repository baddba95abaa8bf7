"""The transports between clusters that benchmarks hold side by side, each with its security."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A transport with its security."""

    transport: str
    security: str

    def __str__(self) -> str:
        return f"{self.transport}/{self.security}"


GLOO = Kind("gloo", "none")
KINDS = {str(kind): kind for kind in (GLOO, Kind("link", "none"), Kind("link", "curve"))}


def parse_kinds(text: str) -> list[Kind]:
    """Read names of kinds with commas between them; ValueError for another."""
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if name not in KINDS]
    if wrong:
        raise ValueError(f"--kinds has {wrong[0]!r}; it takes {', '.join(KINDS)}")
    return [KINDS[name] for name in names]
