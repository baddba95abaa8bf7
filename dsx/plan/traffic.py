"""What the fragments of a model send, and what each transfer takes on a link.

The bytes are those that a method's compressor declares (`Compressor.traffic`), with the header of
every transfer and the sideband behind it; tests compare with runs, to the byte. They are per
cluster, because slices of a mean and the owners of factors differ from cluster to cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsx.compress.base import Launch
from dsx.compress.slices import Rounds, exact_rounds
from dsx.core.exchange import COMMIT_BYTES, HEADER_BYTES
from dsx.core.types import Fragment, History, ParameterShape, Slot
from dsx.method.fragments import Fragmenter, lay_out
from dsx.method.method import Method
from dsx.outer.sideband import sideband_shape
from dsx.plan.coding import coding_seconds, share_seconds
from dsx.plan.link import ROUND_ONE_WAYS, Costs, Link
from dsx.plan.timeline import Cost

Ranks = Sequence[Sequence[Fragment]]
Sizes = NDArray[np.int64]
Counted = tuple[int, Rounds]


def one_rank(fragmenter: Fragmenter, parameters: Sequence[ParameterShape]) -> list[list[Fragment]]:
    """Return the fragments of a model that one rank of each cluster holds, in model order."""
    wholes = {p.name: p.shape for p in parameters}
    pieces = {name: (shape, 0) for name, shape in wholes.items()}
    return [lay_out(fragmenter.assign(parameters), pieces, wholes)]


def of_sizes(numels: Iterable[int]) -> list[list[Fragment]]:
    """Return fragments of which only the sizes are known: each one matrix of a single row."""
    return [[Fragment(i, 0, (Slot(f"fragment.{i}", (1, n), 0),)) for i, n in enumerate(numels)]]


class Share(NamedTuple):
    """What a rank sends of a fragment; `ranks` of them send the same, `shard` is the first's."""

    fragment: Fragment
    shard: int = 0
    ranks: int = 1


class Load(NamedTuple):
    """A fragment as the ranks of a cluster send it; `num_tensors` are those of the whole one."""

    stage: int
    id: int
    num_tensors: int
    shares: tuple[Share, ...]

    @property
    def numel(self) -> int:
        """Elements of all ranks."""
        return sum(share.ranks * share.fragment.numel for share in self.shares)


def loads_of(ranks: Ranks) -> list[Load]:
    """Return every fragment with its shares on all ranks, in the order of stages and numbers."""
    names: dict[tuple[int, int], set[str]] = {}
    shares: dict[tuple[int, int], list[Share]] = {}
    for fragments in ranks:
        for f in fragments:
            key = (f.stage, f.id)
            names.setdefault(key, set()).update(s.name for s in f.layout)
            own = shares.setdefault(key, [])
            own.append(Share(f, shard=len(own)))
    return [
        Load(*key, len(names[key]), tuple(s for s in shares[key] if s.fragment.numel))
        for key in sorted(names)
    ]


def initial_rank(method: Method) -> int | None:
    """Return the rank that low-rank factors start with, None without any."""
    controlled = method.control.sync_params(method.sync_params, History(0)).rank
    return controlled or getattr(method.compression, "rank", None)


class Traffic:
    """What every fragment sends, and what its coding takes: of a model, a method, C clusters.

    `bytes_sent` are those of a usual transfer, by fragment and cluster.
    """

    def __init__(self, method: Method, loads: Sequence[Load], num_clusters: int) -> None:
        self.num_clusters = num_clusters
        self._method = method
        self._rank = initial_rank(method)
        self.loads = list(loads)
        self.num_stages = len({load.stage for load in loads})
        usual = method.compression.usual_round
        self._rounds = [self._rounds_of(load, usual) for load in loads]
        self.bytes_sent = [rounds[:, :, 0].sum(axis=0).tolist() for rounds in self._rounds]

    def sent_in(self, index: int, number: int) -> list[int]:
        """Return what each cluster sends in a fragment's `number`-th launch, counted from 1."""
        return self._rounds_of(self.loads[index], number)[:, :, 0].sum(axis=0).tolist()

    def cost(self, index: int, link: Link, costs: Costs) -> Cost:
        """Return what a transfer of a fragment takes, on the rank with most of it.

        Exchange rounds go one after another, and each ends with the cluster that sends or receives
        most in it.
        """
        fragments = [share.fragment for share in self.loads[index].shares]
        if not fragments or self.num_clusters == 1:
            return Cost(0.0, 0.0, 0.0)
        largest = max(fragments, key=lambda f: f.numel)
        compression, rank = self._method.compression, self._rank or 0
        before, after = coding_seconds(largest, compression, rank, self.num_clusters, costs)
        blocking = costs.blocking_seconds_per_element * largest.numel
        if self._method.encodes_at_launch:  # which a run of such a method has measured, too
            at_launch = share_seconds(largest, compression, self.num_clusters, costs)
            blocking = max(blocking, at_launch / self.num_stages)  # stages work side by side
        held = int(self._rounds[index].max(axis=(1, 2)).sum())
        num_rounds = len(self._rounds[index]) - 1  # beside the handshake
        latency = ROUND_ONE_WAYS * link.latency_seconds
        return Cost(
            before + latency,  # of the handshake
            held / link.payload_bytes_per_second,
            after + num_rounds * latency,
            blocking,
        )

    def _rounds_of(self, load: Load, number: int) -> Sizes:
        """Return what a transfer's rounds take of all ranks: handshake, codes, sideband, commit.

        Bytes by round and cluster, sent and received.
        """
        launch, clusters = Launch(number, self._rank), self.num_clusters
        peers_of_ranks, codes, beside = 0, list[Counted](), list[Counted]()
        for fragment, shard, ranks in load.shares:
            peers_of_ranks += ranks * (clusters - 1)
            sent = self._method.compression.traffic(fragment, clusters, launch, shard)
            codes.append((ranks, sent))
            numel = sideband_shape(self._method, fragment, load.num_tensors, clusters).numel
            if numel:
                beside.append((ranks, exact_rounds(numel, clusters)))
        handshake, commit = (
            np.full((1, clusters, 2), peers_of_ranks * size)
            for size in (HEADER_BYTES, COMMIT_BYTES)
        )
        averaged = [_together(codes, clusters), _together(beside, clusters)]
        return np.concatenate([handshake, *averaged, commit])


def _together(kinds: Sequence[Counted], num_clusters: int) -> Sizes:
    """Return the rounds of ranks that send at once, of each kind so many."""
    longest = max((len(rounds) for _, rounds in kinds), default=0)
    total = np.zeros((longest, num_clusters, 2), dtype=np.int64)
    for count, rounds in kinds:
        if rounds:
            total[: len(rounds)] += count * np.array(rounds, dtype=np.int64)
    return total
