"""Measure the link between clusters over the connections that training uses.

One process per cluster; all call the same functions in the same order. What a measurement took is
told to all before the next one, so they hold the same figures and grow sizes alike: cluster 0 gives
the settings, every further choice is a function of what was agreed. Clusters that have no part in a
measurement wait without traffic.

Round trips are of single bytes whose receives are posted beforehand. A bandwidth counts payload
bytes, at the receiver, from when both ends are ready until the last byte is there, less the
latency (which a plan counts by itself). All-reduce is `ExactMean`, the fp32 mean of dsx; its
bandwidth is what one cluster sends in a second, up to the slowest one's end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from dsx.bench.net_test.figures import AllReduce, Figures, PairBandwidth, RoundTrip
from dsx.bench.net_test.settings import Settings
from dsx.comm.gloo import FragmentGroups
from dsx.comm.meet import meet
from dsx.comm.point_to_point import PointToPoint
from dsx.comm.rendezvous import Rendezvous
from dsx.comm.topology import RankInfo
from dsx.compress.averaging import ExactMean
from dsx.compress.slices import exact_rounds
from dsx.core.membership import Seat
from dsx.plan.link import ROUND_ONE_WAYS

_FIRST_BYTES = 64 * 1024
_MOST_BYTES = 512 * 2**20
_LONG_ENOUGH = 0.6  # of the seconds asked for
_FIRST_PINGS, _LEAST_PINGS, _MOST_PINGS = 3, 5, 100
_READY, _PING, _PONG, _AGREED = 1, 2, 3, 4  # tags; 0 is data's


def measure(settings: Settings, tell: Callable[[str], None]) -> Figures:
    """Meet the other clusters and measure; the same figures on all of them.

    Raises ValueError for settings that do not fit the others', PeerLost for a cluster that does
    not come or is lost.
    """
    deadline = settings.deadline_seconds
    rank_info, way = RankInfo(settings.cluster_id, settings.clusters, 0, 1), settings.way
    store, link = way.meet(rank_info, deadline)
    session = meet(store, rank_info, deadline, may_differ=["versions"])
    rendezvous = Rendezvous(store, rank_info, session, deadline)
    seconds, streams = rendezvous.gather(
        "settings of cluster 0", [settings.seconds, settings.streams]
    )[0]
    seat = Seat.of(settings.cluster_id, settings.clusters)
    shared = rendezvous.group_store("net_test") if link is None else store
    groups = way.connect(shared, link, "net_test", seat, max(streams), deadline)
    links = _Links(seat, groups, deadline)
    tell(f"{settings.clusters} clusters have met")
    round_trips = [links.round_trip(a, b, seconds) for a, b in links.pairs]
    links.round_trip_seconds = max(each.median_seconds for each in round_trips)
    pairs = [
        found for a, b in links.pairs for found in _of_pair(links, a, b, seconds, streams, tell)
    ]
    all_reduce = list(_of_all(links, seconds, streams, tell))
    rendezvous.gather("end of the measurements", None)  # nobody leaves what others still read
    if link is not None:
        link.close()  # what was said last arrives
    transport, security = way.transport, way.security
    return Figures(settings.clusters, seconds, round_trips, pairs, all_reduce, transport, security)


def next_size(num_bytes: int, elapsed: float, seconds: float) -> int | None:
    """Return the size to measure next, or None if this one took long enough."""
    if elapsed >= _LONG_ENOUGH * seconds or num_bytes >= _MOST_BYTES:
        return None
    factor = min(max(1.2 * seconds / elapsed, 2.0), 8.0)
    return min(int(num_bytes * factor) // 4 * 4, _MOST_BYTES)


@dataclass
class _Links:
    """This cluster's connections; every method is called by all clusters, in the same order."""

    seat: Seat
    groups: list[Any]
    deadline_seconds: float
    round_trip_seconds: float = 0.0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(combinations(range(self.seat.num_clusters), 2))

    def round_trip(self, a: int, b: int, seconds: float) -> RoundTrip:
        """Ping-pong between two clusters for about so long."""
        label = f"round trip between clusters {a} and {b}"
        first = self._pings(a, b, _FIRST_PINGS, label)
        least = self._agree(label, min(first))[a]
        count = int(min(max(seconds / least, _LEAST_PINGS), _MOST_PINGS))
        taken = self._pings(a, b, count, label)
        median = self._agree(label, statistics.median(taken))[a]
        return RoundTrip((a, b), median, self._agree(label, min(taken))[a], count)

    def transfer(self, senders: list[int], pair: tuple[int, int], streams: int, size: int) -> float:
        """Return the seconds in which the last of the receivers has `size` bytes of its peer."""
        of = " and ".join(f"from cluster {a} to cluster {sum(pair) - a}" for a in senders)
        label = f"{size} bytes {of} over {streams} stream(s)"
        elapsed = 0.0
        if self.seat.position in pair:
            other = sum(pair) - self.seat.position
            elapsed = self._transfer(senders, other, size, streams, label)
        return self._less_latency(max(self._agree(label, elapsed)), 1)

    def all_reduce(self, streams: int, size: int) -> float:
        """Return the seconds in which the slowest cluster has the mean of `size` bytes of fp32."""
        label = f"all-reduce of {size} bytes over {streams} stream(s)"
        group = FragmentGroups(self.groups[:streams], self.seat, self.deadline_seconds)
        exchange = ExactMean(self.seat).exchange(_noise(size // 4))
        self._get_ready(self.seat.others, label)
        started = time.perf_counter()
        for round in exchange:
            group.run(round, label)
        elapsed = time.perf_counter() - started
        one_ways = len(exact_rounds(1, self.seat.num_clusters)) * ROUND_ONE_WAYS
        return self._less_latency(max(self._agree(label, elapsed)), one_ways)

    def _transfer(
        self, senders: list[int], other: int, size: int, streams: int, label: str
    ) -> float:
        receives = self._point_to_point(label, streams=streams)
        if other in senders:  # asked for before the clock starts
            receives.receive(torch.empty(size // 4), other)
        is_sending = self.seat.position in senders
        data = _noise(size // 4 if is_sending else 0)
        self._get_ready([other], label)
        started = time.perf_counter()
        sends = self._point_to_point(label, streams=streams)
        sends.send(data, other)
        receives.wait()
        elapsed = time.perf_counter() - started
        sends.wait()
        return elapsed if other in senders else 0.0

    def _pings(self, a: int, b: int, count: int, label: str) -> list[float]:
        """Return what each round trip took on cluster `a`; of no meaning on the others."""
        own = self.seat.position
        if own not in (a, b):
            return [0.0]
        other, sent, awaited = (b, _PING, _PONG) if own == a else (a, _PONG, _PING)
        taken: list[float] = []
        receives = [self._point_to_point(label, awaited) for _ in range(count)]
        for messages in receives:
            messages.receive(_byte(), other)
        self._get_ready([other], label)
        for messages in receives:
            started = time.perf_counter()
            if own == b:
                messages.wait()
            reply = self._point_to_point(label, sent)
            reply.send(_byte(), other)
            reply.wait()
            if own == a:
                messages.wait()
            taken.append(time.perf_counter() - started)
        return taken

    def _point_to_point(self, label: str, tag: int = 0, streams: int = 1) -> PointToPoint:
        return PointToPoint(self.groups[:streams], self.seat, label, self.deadline_seconds, tag)

    def _agree(self, label: str, value: float) -> list[float]:
        """Return every cluster's value, in cluster order, on all of them."""
        values = torch.full((self.seat.num_clusters,), value, dtype=torch.float64)
        self._exchange_with(self.seat.others, values, label, _AGREED)
        return values.tolist()

    def _get_ready(self, others: list[int], label: str) -> None:
        """Return once the others have come to the same point."""
        self._exchange_with(others, torch.zeros(self.seat.num_clusters), label, _READY)

    def _exchange_with(self, others: list[int], values: Tensor, label: str, tag: int) -> None:
        """Send the others the own one of the values, and fill in theirs."""
        messages, own = self._point_to_point(label, tag), self.seat.position
        for other in others:
            messages.receive(values[other : other + 1], other)
        for other in others:
            messages.send(values[own : own + 1], other)
        messages.wait()

    def _less_latency(self, elapsed: float, one_ways: int) -> float:
        return max(elapsed - one_ways / 2 * self.round_trip_seconds, elapsed / 2)


def _of_pair(
    links: _Links, a: int, b: int, seconds: float, streams: list[int], tell: Callable[[str], None]
) -> Iterator[PairBandwidth]:
    """Yield the figures of both directions, alone and at once, for every number of streams."""
    size = _FIRST_BYTES
    for n in streams:
        tell(f"clusters {a} and {b}, {n} stream(s)")
        rates: list[float] = []
        for senders in ([a], [b], [a, b]):
            take = partial(links.transfer, senders, (a, b), n)
            size, elapsed = _sized(take, size, seconds)
            rates.append(8 * size / elapsed)
        yield PairBandwidth(a, b, n, rates[0], rates[2])
        yield PairBandwidth(b, a, n, rates[1], rates[2])


def _of_all(
    links: _Links, seconds: float, streams: list[int], tell: Callable[[str], None]
) -> Iterator[AllReduce]:
    size, mean = _FIRST_BYTES, ExactMean(links.seat)
    for n in streams:
        tell(f"all-reduce of all clusters, {n} stream(s)")
        size, elapsed = _sized(partial(links.all_reduce, n), size, seconds)
        sent = mean.bytes_sent(size // 4)
        yield AllReduce(n, sent, elapsed, 8 * sent / elapsed)


def _sized(take: Callable[[int], float], num_bytes: int, seconds: float) -> tuple[int, float]:
    """Return the size, grown from `num_bytes`, that takes about so long, and what it took."""
    while True:
        elapsed = take(num_bytes)
        larger = next_size(num_bytes, elapsed, seconds)
        if larger is None:
            return num_bytes, elapsed
        num_bytes = larger


def _noise(numel: int) -> Tensor:
    """Return what a tunnel that compresses cannot shorten."""
    tile = torch.randn(2**20)
    return tile.repeat(-(-numel // len(tile)))[:numel]


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)
