"""How a link is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkOptions:
    """How a link is run. `host` is where it listens; `port` 0 takes any.

    `grace_seconds`: a connection that is closed has so long to come back, and some round trips.
    `dscp` marks all packets.
    """

    host: str = "127.0.0.1"
    port: int = 0
    streams: int = 1
    suspect_seconds: float = 30.0
    grace_seconds: float = 0.7
    dscp: int = 0
