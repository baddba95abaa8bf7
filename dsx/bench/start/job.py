"""What is given to ranks that start, and what they have found, as JSON from process to process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

STARTED = "started"  # said behind the last rank's line
WORLD, MODEL = "world", "model"
OF_ENGINE = WORLD, MODEL  # its own phases, which are not counted


@dataclass(frozen=True)
class Job:
    """A run's size and ports; `ports` are the clusters' launchers', `meeting` where all meet.

    Over links there are folders of `keys`, by cluster, and ports where each is `called_at`.
    """

    num_clusters: int
    ranks: int
    meeting: int
    ports: Sequence[int]
    deadline_seconds: float
    keys: Sequence[str] = ()
    called_at: Sequence[int] = ()

    @classmethod
    def read(cls, text: str) -> Job:
        """Return what `write` has written."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Lap:
    """One phase of one rank: seconds of wall time, and of the processor.

    `serving_seconds` are those of the threads that serve stores, which `cpu_seconds` leaves out.
    `shared` and `own` are requests sent to where all clusters meet, and to the cluster's store;
    over links `shared` are those to ranks of other clusters.
    """

    phase: str
    seconds: float
    cpu_seconds: float
    serving_seconds: float
    shared: int
    own: int


@dataclass(frozen=True)
class Found:
    """What one rank has found; `sockets` are those open at the end.

    `gateway_seconds` and `gateway_joined` are processor time and connections of the gateway that it
    has started, over links; 0 of a rank that has none, and None over gloo.
    """

    cluster: int
    rank: int
    laps: Sequence[Lap]
    sockets: int
    gateway_seconds: float | None = None
    gateway_joined: int = 0

    @classmethod
    def read(cls, text: str) -> Found:
        """Return what `write` has written."""
        found: dict[str, Any] = json.loads(text)
        found["laps"] = [Lap(**lap) for lap in found["laps"]]
        return cls(**found)

    def write(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    def sum(self, name: str, without: Sequence[str] = OF_ENGINE) -> float:
        """Return the sum of a field over all phases but some: those of the engine, by default."""
        return sum(getattr(lap, name) for lap in self.laps if lap.phase not in without)
