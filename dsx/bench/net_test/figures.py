"""What `dsx net-test` finds, and the file that `--json` writes and `dsx plan --link` may read.

The file is one object. What a plan needs is at its top:

    clusters           how many took part
    bits_per_second    payload that one cluster sends in an all-reduce, with `streams`
    latency_seconds    one way: half the largest median round trip
    streams            the number to give as link.streams

Then `transport` ("gloo" or "link") and `security` ("none" or "curve"),
`seconds_per_measurement`, and as lists `round_trips` (clusters, median_seconds, min_seconds,
count), `pairs` (from_cluster, to_cluster, streams, one_way_bits_per_second, and
both_ways_bits_per_second: of each direction while both send), `all_reduce` (streams, bytes_sent,
seconds, bits_per_second), and `plans` (see advice.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

WORTHWHILE = 1.05  # what more streams must gain


@dataclass(frozen=True)
class RoundTrip:
    """Of single bytes between two clusters."""

    clusters: tuple[int, int]
    median_seconds: float
    min_seconds: float
    count: int


@dataclass(frozen=True)
class PairBandwidth:
    """Of one direction, alone and while the other one sends, too."""

    from_cluster: int
    to_cluster: int
    streams: int
    one_way_bits_per_second: float
    both_ways_bits_per_second: float


@dataclass(frozen=True)
class AllReduce:
    """Of all clusters at once; `bytes_sent` by each."""

    streams: int
    bytes_sent: int
    seconds: float
    bits_per_second: float


@dataclass(frozen=True)
class Figures:
    """All that was measured."""

    clusters: int
    seconds_per_measurement: float
    round_trips: list[RoundTrip]
    pairs: list[PairBandwidth]
    all_reduce: list[AllReduce]
    transport: str = "gloo"
    security: str = "none"

    @property
    def best(self) -> AllReduce:
        """The least number of streams that none beats by more than 5 %."""
        fastest = max(each.bits_per_second for each in self.all_reduce)
        return next(e for e in self.all_reduce if e.bits_per_second * WORTHWHILE >= fastest)

    @property
    def latency_seconds(self) -> float:
        """One way, of the pair that is farthest apart."""
        return max(each.median_seconds for each in self.round_trips) / 2

    def as_json(self) -> dict[str, Any]:
        """Return what the file holds, but for the plans."""
        return {
            "clusters": self.clusters,
            "bits_per_second": self.best.bits_per_second,
            "latency_seconds": self.latency_seconds,
            "streams": self.best.streams,
            **{k: v for k, v in asdict(self).items() if k != "clusters"},
        }
