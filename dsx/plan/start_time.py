"""How long a run takes to start, from processor time and requests that were measured small.

On a host of its own every rank has a core, so a start takes what nobody can do beside others: the
first rank's own work, and what the process does that serves the store where all ranks of all
clusters meet, one request after another. With C clusters of N ranks

    T = fixed + first(C, N) + connection (C N + N) + request (C N s(C) + N o(N) + f(N)) + R(C) RTT
    first = a + b C + c N,   s = s0 + s1 C,   o = o0 + o1 log2 N,   f = f0 + f1 N
    R = s + 2 per fragment + 10

where s and o are requests of a rank to the store of all and to its cluster's, and f those of the
first rank to the latter. The first rank of cluster 0 is taken to serve both.

Over secured links first ranks alone meet, so no term has C N, and a host's ranks are called through
its gateway, with H ranks to a host and k connections to each peer:

    T = fixed + first(C, N) + connection N + request (N o(N) + f(N)) + gateway(H (C-1) k) + R(C) RTT
    gateway(j) = g0 + g1 j,   R = s + 10 for two links, one after the other

where s are requests of the first rank of a cluster to that of the one where all meet.

Imports are not in it, nor what the engine does to start, such as its own process groups, nor what a
name service takes. `dsx bench start` measures, fits and writes start_time.json, and with
`--transport link` start_time_links.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

MEETING_ROUND_TRIPS = 10  # of first ranks, from nonce to session
LINK_ROUND_TRIPS = 10  # of two links: TCP, libzmq's greeting, two of CURVE, a hello; each
RANKS_OF_HOST = 8
_FILES = {
    "gloo": Path(__file__).with_suffix(".json"),
    "link": Path(__file__).with_name("start_time_links.json"),
}


@dataclass(frozen=True)
class Measured:
    """One start that was measured: processor seconds, and requests that are each rank's.

    `first_seconds` are the first rank's of cluster 0 without serving, `serving_seconds` its serving
    of `served` requests on `connections`, `other_seconds` the mean of ranks that are first nowhere.
    `shared` and `own` are those ranks' requests, `own_first` that first rank's.
    `wall_seconds` are those of the slowest rank, all of them on the cores of this host.

    Over links no rank asks where all clusters meet but first ones: `shared` are then those of
    cluster 1's, and `gateway_seconds` those of cluster 0's gateway, for `gateway_joined` of them.
    """

    num_clusters: int
    ranks: int
    wall_seconds: float
    first_seconds: float
    serving_seconds: float
    other_seconds: float
    served: int
    connections: int
    shared: float
    own: float
    own_first: int
    sockets_first: int
    sockets_other: int
    gateway_seconds: float | None = None
    gateway_joined: int = 0


@dataclass(frozen=True)
class Terms:
    """What a start is made of, in seconds."""

    fixed: float
    first_rank: float
    store_of_all: float
    store_of_cluster: float
    gateway: float
    round_trips: float

    @property
    def total(self) -> float:
        """Their sum."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class StartModel:
    """The coefficients, with the command that has made them; see the module."""

    fixed_seconds: float
    first: tuple[float, float, float]
    connection_seconds: float
    request_seconds: float
    shared: tuple[float, float]
    own: tuple[float, float]
    own_first: tuple[float, float]
    hash_bytes_per_second: float
    command: str
    host: str
    gateway: tuple[float, float] | None = None  # None: over gloo

    def terms(
        self,
        num_clusters: int,
        ranks: int,
        rtt_seconds: float = 0.0,
        fragments: int = 0,
        streams: int = 1,
    ) -> Terms:
        """Return what a start of C clusters of N ranks takes; weights come on top.

        `fragments` count over gloo, and `streams` of each link over links.
        """
        c, n = num_clusters, ranks
        shared = self.shared_requests(c)
        own = n * self.own_requests(n) + self.own_first[0] + self.own_first[1] * n
        a, per_cluster, per_rank = self.first
        first_rank = a + per_cluster * c + per_rank * n
        of_cluster = n * self.connection_seconds + self.request_seconds * own
        if self.gateway is not None:
            joined = min(n, RANKS_OF_HOST) * (c - 1) * (streams + 1)
            gateway = self.gateway[0] + self.gateway[1] * joined if n > 1 else 0.0
            trips = (shared + LINK_ROUND_TRIPS) * rtt_seconds
            return Terms(self.fixed_seconds, first_rank, 0.0, of_cluster, gateway, trips)
        trips = shared + 2 * fragments + MEETING_ROUND_TRIPS
        of_all = c * n * (self.connection_seconds + self.request_seconds * shared)
        return Terms(self.fixed_seconds, first_rank, of_all, of_cluster, 0.0, trips * rtt_seconds)

    def shared_requests(self, num_clusters: int) -> float:
        """Return s."""
        return self.shared[0] + self.shared[1] * num_clusters

    def own_requests(self, ranks: int) -> float:
        """Return o: a ring has two neighbours, and a tree as many levels as N has bits."""
        return self.own[0] + self.own[1] * math.log2(ranks)

    def hash_seconds(self, num_bytes: int) -> float:
        """Return what digests of so many bytes of masters take on one rank."""
        return num_bytes / self.hash_bytes_per_second

    def write(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


@cache
def start_model(transport: Literal["gloo", "link"] = "gloo") -> StartModel:
    """Return the model that comes with dsx."""
    return read_model(_FILES[transport].read_text())


def read_model(text: str) -> StartModel:
    """Return what `StartModel.write` has written."""
    read: dict[str, Any] = json.loads(text)
    for name in ("first", "shared", "own", "own_first", "gateway"):
        if read[name] is not None:
            read[name] = tuple(read[name])
    return StartModel(**read)


def require_sizes(option: str, text: str) -> list[tuple[int, int]]:
    """Read "2x8,4x32", clusters and ranks of each; ValueError for another form or none."""
    try:
        pairs = [(int(c), int(n)) for c, n in (size.split("x") for size in text.split(","))]
    except ValueError:
        pairs = [(0, 0)]
    if any(c < 2 or n < 1 for c, n in pairs):
        raise ValueError(
            f"{option} {text!r}: write clusters x ranks of each, 2 clusters or more, with commas "
            "between: 2x8,4x32"
        )
    return pairs


def fit(rows: Sequence[Measured], hash_rate: float, command: str, host: str) -> StartModel:
    """Fit all coefficients, none below 0; ValueError for too few sizes to tell them apart.

    Errors count by what they are of what was measured, so that small starts count as large ones.
    """
    sizes = {(row.num_clusters, row.ranks) for row in rows if row.ranks > 1}
    clusters, ranks = {c for c, _ in sizes}, {n for _, n in sizes}
    if len(clusters) < 2 or len(ranks) < 2 or len(sizes) < 3:
        raise ValueError(
            "a fit takes two numbers of clusters, two numbers of ranks above 1, and three sizes "
            f"of them; these are {sorted(sizes)}: measure more, such as --sizes 2x8,2x32,4x8"
        )
    many = [row for row in rows if row.ranks > 1]
    c = np.array([row.num_clusters for row in rows], float)
    n = np.array([row.ranks for row in rows], float)
    one = np.ones(len(rows))
    of_many = np.array([[1.0, row.num_clusters] for row in many])
    first = _least_squares([one, c, n], [row.first_seconds for row in rows])
    serving = _least_squares(
        [[row.connections for row in rows], [row.served for row in rows]],
        [row.serving_seconds for row in rows],
    )
    shared = _least_squares(of_many.T, [row.shared for row in many])
    gateways = [row for row in many if row.gateway_seconds]
    gateway: tuple[float, float] | None = None
    if gateways:
        joined = [[1.0] * len(gateways), [row.gateway_joined for row in gateways]]
        start, each = _least_squares(joined, [row.gateway_seconds or 0.0 for row in gateways])
        gateway = start, each
    of_many[:, 1] = [math.log2(row.ranks) for row in many]
    own = _least_squares(of_many.T, [row.own for row in many])
    of_first = _least_squares([one, n], [row.own_first for row in rows])
    smallest = min(rows, key=lambda row: row.num_clusters * row.ranks)
    busy = smallest.first_seconds + smallest.serving_seconds
    return StartModel(
        max(smallest.wall_seconds - busy, 0.0), (first[0], first[1], first[2]), serving[0],
        serving[1], (shared[0], shared[1]), (own[0], own[1]),
        (of_first[0], of_first[1]), hash_rate, command, host, gateway,
    )  # fmt: skip


def _least_squares(columns: Any, measured: Sequence[float]) -> list[float]:
    """Return coefficients, none below 0, of least relative errors: the best of all active sets."""
    y = np.array(measured, float)
    x = np.array(columns, float).T / y[:, None]
    best: tuple[float, np.ndarray[Any, Any]] | None = None
    for mask in range(1, 1 << x.shape[1]):
        used = [k for k in range(x.shape[1]) if mask >> k & 1]
        found = np.linalg.lstsq(x[:, used], np.ones(len(y)), rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(np.square(x[:, used] @ found - 1).sum())
        if best is None or error < best[0] - 1e-12:
            whole = np.zeros(x.shape[1])
            whole[used] = found
            best = error, whole
    assert best is not None  # one column alone has a coefficient above 0
    return [float(value) for value in best[1]]
