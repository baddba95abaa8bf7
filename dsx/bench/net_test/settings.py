"""What `dsx net-test` is asked, checked before any cluster is waited for."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from dsx.comm.multistream import MAX_STREAMS
from dsx.plan.published.scenario import require_number


@dataclass(frozen=True)
class Settings:
    """One cluster's command line; `seconds` and `streams` count on cluster 0 only."""

    clusters: int
    cluster_id: int
    rendezvous: str
    interface: str | None
    seconds: float
    streams: list[int]
    deadline_seconds: float

    def __post_init__(self) -> None:
        require_number("clusters", self.clusters, 2, 10**4)
        require_number("cluster-id", self.cluster_id, 0, self.clusters - 1)
        require_number("seconds", self.seconds, 0.01, 600)
        require_number("deadline-seconds", self.deadline_seconds, 0.1, 86_400)
        names = [name for _, name in socket.if_nameindex()]
        if self.interface is not None and self.interface not in names:
            raise ValueError(
                f"interface={self.interface!r} must be one of this host's: {', '.join(names)}"
            )
        if 4 * self.seconds > self.deadline_seconds:
            raise ValueError(
                f"deadline-seconds={self.deadline_seconds:g} must be at least 4 times "
                f"seconds={self.seconds:g}; try {4 * self.seconds:g}"
            )

    @property
    def deadline(self) -> timedelta:
        """How long to wait for another cluster."""
        return timedelta(seconds=self.deadline_seconds)


def read_streams(text: str) -> list[int]:
    """Read numbers of streams with commas between them, sorted; ValueError for what is none."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if not 1 <= numbers[0] <= numbers[-1] <= MAX_STREAMS:
        raise ValueError(
            f"streams={text!r} must be numbers from 1 to {MAX_STREAMS} with commas between them; "
            "try 1,2,4,8"
        )
    return numbers
