"""What `dsx net-test` is asked, checked before any cluster is waited for."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from dsx.comm.address import parse_address
from dsx.comm.connections import Way
from dsx.comm.links.settings import LinkSettings
from dsx.comm.multistream import MAX_STREAMS
from dsx.config.schema import load_config
from dsx.plan.published.scenario import require_number


@dataclass(frozen=True)
class Settings:
    """One cluster's command line; `seconds` and `streams` count on cluster 0 only."""

    clusters: int
    cluster_id: int
    way: Way
    seconds: float
    streams: list[int]
    deadline_seconds: float

    def __post_init__(self) -> None:
        require_number("clusters", self.clusters, 2, 10**4)
        require_number("cluster-id", self.cluster_id, 0, self.clusters - 1)
        require_number("seconds", self.seconds, 0.01, 600)
        require_number("deadline-seconds", self.deadline_seconds, 0.1, 86_400)
        if self.way.link is None and self.way.rendezvous is None:
            raise ValueError(
                "--rendezvous is missing: give tcp://HOST:PORT, a host of cluster 0, or --config "
                "FILE of a run with link.members"
            )
        if self.way.link is not None and self.way.rendezvous is not None:
            raise ValueError(
                f"--rendezvous {self.way.rendezvous} beside link.members, at whose first address "
                "clusters meet; leave it out"
            )
        if self.way.rendezvous is not None:
            parse_address(self.way.rendezvous)
        names = [name for _, name in socket.if_nameindex()]
        interface = self.way.interface
        if interface is not None and interface not in names:
            raise ValueError(
                f"interface={interface!r} must be one of this host's: {', '.join(names)}"
            )
        if 4 * self.seconds > self.deadline_seconds:
            raise ValueError(
                f"deadline-seconds={self.deadline_seconds:g} must be at least 4 times "
                f"seconds={self.seconds:g}; try {4 * self.seconds:g}"
            )


def link_of(config: Path, clusters: int) -> LinkSettings | None:
    """Return the links of a run's JSON; None where it takes gloo. ValueError for what is wrong."""
    settings = load_config(config)
    link = settings.link.settings
    if link is not None and len(link.members) != clusters:
        raise ValueError(
            f"{config} names {len(link.members)} link.members, but --clusters={clusters}: name "
            "each cluster of the test there"
        )
    return link


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
