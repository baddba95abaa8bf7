"""What both ends of one measurement are told, and what each of them finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dsx.bench.kinds import Kind
from dsx.comm.connections import Way
from dsx.comm.links.settings import LinkSettings

NAMES = ("first", "second")  # the members, as their keys are named
FOUND = "found "  # before the line that an end prints


@dataclass(frozen=True)
class Job:
    """One measurement: messages of `message_bytes`, `batch` of them posted at once, twice over.

    `ways` 1: from cluster 0 to cluster 1 alone. `seconds` of transfer, and as many of training
    beside one and of training alone, `training_windows` times; `keys` has a folder per cluster.
    With `rounds` none of that, but so many rounds of a run (rounds.py).
    """

    kind: Kind
    addresses: Sequence[str]
    ports: Sequence[int]
    keys: Sequence[str]
    ways: int
    message_bytes: int
    batch: int
    seconds: float
    training_windows: int
    interface: str
    deadline_seconds: float
    rounds: int = 0

    def way(self, cluster: int) -> Way:
        """Return how a cluster reaches the other."""
        if self.kind.transport == "gloo":
            return Way(f"tcp://{self.addresses[0]}:{self.ports[0]}", interface=self.interface)
        members = tuple(
            f"{name}={address}:{port}"
            for name, address, port in zip(NAMES, self.addresses, self.ports, strict=True)
        )
        settings = LinkSettings(
            self.kind.security, members, keys=self.keys[cluster], port=self.ports[cluster],
            host=self.addresses[cluster],
        )  # fmt: skip
        return Way(None, settings, self.interface)

    def write(self) -> str:
        """Return the text that `read` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Job:
        """Read what `write` has written."""
        fields = json.loads(text)
        kind = Kind(**fields.pop("kind"))
        return cls(kind=kind, **fields)


@dataclass(frozen=True)
class Passed:
    """Of one end, from the first byte to the last; wire bytes are what its interface has sent.

    `payload_bytes` are those it has sent.
    """

    seconds: float
    cpu_seconds: float
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class Found:
    """What one end has found; steps in seconds, one window of each kind after the other."""

    passed: Passed
    alone: Sequence[float]
    beside: Sequence[float]

    @classmethod
    def read(cls, text: str) -> Found:
        """Read the JSON of one."""
        fields = json.loads(text)
        return cls(Passed(**fields["passed"]), fields["alone"], fields["beside"])
