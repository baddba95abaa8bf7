"""What the fragments of a model send, and what each transfer takes on a link.

The bytes are those that a method's compressor declares (`Compressor.traffic`), with the header of
every transfer and the sideband behind it; tests compare with runs, to the byte. They are per
cluster, because slices of a mean and the owners of factors differ from cluster to cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dsx.compress.base import Launch
from dsx.compress.slices import SENT, Rounds, Sizes, exact_rounds, no_rounds, side_by_side
from dsx.core.exchange import COMMIT_BYTES, HEADER_BYTES
from dsx.core.types import Fragment, History, ParameterShape, Slot
from dsx.method.fragments import Fragmenter, lay_out
from dsx.method.method import Method
from dsx.outer.sideband import sideband_shape
from dsx.plan.coding import coding_seconds, share_seconds
from dsx.plan.link import ROUND_ONE_WAYS, Costs, Link
from dsx.plan.timeline import Cost

Ranks = Sequence[Sequence[Fragment]]


def one_rank(fragmenter: Fragmenter, parameters: Sequence[ParameterShape]) -> list[list[Fragment]]:
    """Return the fragments of a model that one rank of each cluster holds, in model order."""
    wholes = {p.name: p.shape for p in parameters}
    pieces = {name: (shape, 0) for name, shape in wholes.items()}
    return [lay_out(fragmenter.assign(parameters), pieces, wholes)]


def of_sizes(numels: Iterable[int]) -> list[list[Fragment]]:
    """Return fragments of which only the sizes are known: each one matrix of a single row."""
    return [[Fragment(i, 0, (Slot(f"fragment.{i}", (1, n), 0),)) for i, n in enumerate(numels)]]


class Share(NamedTuple):
    """What ranks send of a fragment: those with the numbers `shards`, each as `ranks` others do."""

    fragment: Fragment
    shards: tuple[int, ...] = (0,)
    ranks: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of these ranks."""
        return len(self.shards) * self.ranks * self.fragment.numel


class Load(NamedTuple):
    """A fragment as the ranks of a cluster send it; `num_tensors` are those of the whole one."""

    stage: int
    id: int
    num_tensors: int
    shares: tuple[Share, ...]

    @property
    def numel(self) -> int:
        """Elements of all ranks."""
        return sum(share.numel for share in self.shares)


def loads_of(ranks: Ranks) -> list[Load]:
    """Return every fragment with its shares on all ranks, in the order of stages and numbers."""
    names: dict[tuple[int, int], set[str]] = {}
    shares: dict[tuple[int, int], list[Share]] = {}
    for fragments in ranks:
        for f in fragments:
            key = (f.stage, f.id)
            names.setdefault(key, set()).update(s.name for s in f.layout)
            own = shares.setdefault(key, [])
            own.append(Share(f, (len(own),)))
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
        self._most_rank = method.control.largest_rank or None
        self.loads = list(loads)
        self.num_stages = len({load.stage for load in loads})
        usual = method.compression.usual_round
        rounds = [self._rounds_of(load, usual) for load in loads]
        self.bytes_sent: Sizes = np.array([r[:, :, SENT].sum(axis=0) for r in rounds])
        self._held = [(len(r), int(r.max(axis=(1, 2)).sum())) for r in rounds]
        self._coding: tuple[Costs, dict[int, tuple[float, float, float]]] = Costs(), {}

    def sent_in(self, index: int, number: int) -> list[int]:
        """Return what each cluster sends in a fragment's `number`-th launch, counted from 1."""
        return self._rounds_of(self.loads[index], number)[:, :, SENT].sum(axis=0).tolist()

    def cost(self, index: int, link: Link, costs: Costs) -> Cost:
        """Return what a transfer of a fragment takes, on the rank with most of it.

        Exchange rounds go one after another, and each ends with the cluster that sends or receives
        most in it.
        """
        if not self.loads[index].shares or self.num_clusters == 1:
            return Cost(0.0, 0.0, 0.0)
        before, after, blocking = self._coding_seconds(index, costs)
        num_rounds, held = self._held[index]
        latency = ROUND_ONE_WAYS * link.latency_seconds
        return Cost(
            before + latency,  # of the handshake
            held / link.payload_bytes_per_second,
            after + (num_rounds - 1) * latency,
            blocking,
            before,
            after,
        )

    def _coding_seconds(self, index: int, costs: Costs) -> tuple[float, float, float]:
        """Return a thread's seconds before the link and after it, and the training thread's."""
        if self._coding[0] is not costs:
            self._coding = costs, {}
        known = self._coding[1]
        if index not in known:
            largest = max((s.fragment for s in self.loads[index].shares), key=lambda f: f.numel)
            clusters = self.num_clusters
            compression, rank = self._method.compression, self._rank or 0
            before, after = coding_seconds(largest, compression, rank, clusters, costs)
            # stages work side by side, so each of their fragments holds up training by its part
            blocking = costs.blocking_seconds_per_element * largest.numel / self.num_stages
            if self._method.encodes_at_launch:
                share = share_seconds(largest, compression, clusters, costs)
                if self._method.waits_for_codes:
                    codes = share / self.num_stages
                    blocking = max(blocking, codes) if costs.is_of_run else blocking + codes
                else:
                    before = max(before, share)
            known[index] = before, after, blocking
        return known[index]

    def _rounds_of(self, load: Load, number: int) -> Rounds:
        """Return what a transfer's rounds take of all ranks: handshake, codes, sideband, commit.

        Bytes by round and cluster, sent and received.
        """
        launch, clusters = Launch(number, self._rank, self._most_rank), self.num_clusters
        codes, beside = [no_rounds(clusters)], [no_rounds(clusters)]
        times = [0]
        for fragment, shards, ranks in load.shares:
            numel = sideband_shape(self._method, fragment, load.num_tensors, clusters).numel
            around = exact_rounds(numel, clusters) if numel else no_rounds(clusters)
            for turn, count in Counter(shard % clusters for shard in shards).items():
                codes.append(self._method.compression.traffic(fragment, clusters, launch, turn))
                beside.append(around)
                times.append(count * ranks)
        peers_of_ranks = sum(times) * (clusters - 1)
        handshake, commit = (
            np.full((1, clusters, 2), peers_of_ranks * size)
            for size in (HEADER_BYTES, COMMIT_BYTES)
        )
        averaged = [side_by_side(exchanges, times) for exchanges in (codes, beside)]
        return np.concatenate([handshake, *averaged, commit])
