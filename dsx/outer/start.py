"""How an outer loop begins: what all clusters train from, and what follows from it.

Clusters tell each other the digests of their masters, a few bytes for every fragment, and only what
differs is sent: the first member's, to those that have something else. So a start from equal
weights or from equal checkpoints sends next to nothing.

What differs may be sent later (`settle`): where a checkpoint may be loaded first, into an
engine whose weights are new, all of it would be for nothing. Until then no step may be taken.
Where a checkpoint has been loaded before, each keeps its own masters, and nothing is compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.exchange import Exchange, to_all
from dsx.core.fifo import Fifo
from dsx.core.progress import Progress
from dsx.core.transport import START, Pending, Submission, Transport
from dsx.core.units import format_bytes
from dsx.method.method import Method
from dsx.outer.digest import NUMBERS, Digests
from dsx.outer.rounds import until_all_are_done
from dsx.outer.state import StateStore
from dsx.outer.transfer import Arrived

FIRST = 0  # whose masters all take, by place in the membership
_IS_LARGE = 100e6  # bytes that somebody may want to spare the line
_ADVICE = "seed all clusters alike, or load the same weights first, and nothing is sent"
SETTLING = (
    "the clusters' weights differ and are about to be sent, as the model is used: call "
    "engine.dsx.settle() on all ranks before a forward on one of them"
)
logger = logging.getLogger(__name__)


@dataclass
class Begun:
    """What a start has sent and received between clusters, all ranks of this one together.

    `apart` are the fragments of this rank's stage that were not equal in all clusters.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    apart: list[int] = field(default_factory=list[int])


class Start:
    """Sets the masters of one rank, and its anchors and slots from them, before training."""

    def __init__(
        self, method: Method, adapter: EngineAdapter, transport: Transport, state: StateStore
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._transport = transport
        self._state = state
        self.is_open = False  # masters differ, and are still to be sent; alike on all ranks
        self.begun = Begun()

    @torch.no_grad()
    def taking(self, keeps_masters: bool = False, waits: bool = False) -> Iterator[None]:
        """Take the first member's masters, or keep the own. Collective over all clusters.

        Clusters of one process take turns where it yields. With `waits` what differs is left as it
        is, and `is_open` says so.
        """
        if keeps_masters or self._transport.seat.num_clusters == 1:
            self._begin()
            self._adapter.sync_model_weights()
            return
        since = time.perf_counter()
        asked = self._ask(self._begin())
        yield
        takers = self._takers(asked.wait())
        apart, sent, received, anywhere = self._agree(takers)
        self.is_open = waits and anywhere > 0
        self._tell(apart, max(sent, received))
        if self.is_open:
            sent = received = 0
        elif anywhere:
            yield from self._sending(takers)
        self._adapter.sync_model_weights()
        told = self._sum_over_cluster([asked.bytes_sent])[0]
        seconds = self.begun.seconds + time.perf_counter() - since
        self.begun = Begun(self.begun.bytes_sent + told + sent, received, seconds, sorted(apart))

    def settle(self) -> None:
        """Send what was left as it is, and differs now. Collective over all clusters, once."""
        if self.is_open:
            for _ in self.taking():
                pass

    def record(self) -> dict[str, Any]:
        """Return what the record of the start says of it."""
        return {"masters": asdict(self.begun)}

    def require_settled(self) -> None:
        """Raise RuntimeError where a step has been taken from weights that differ."""
        if self.is_open:
            raise RuntimeError(
                "an inner step was taken while the clusters' weights still differ: cluster 0's "
                "are taken where the engine's forward, train_batch or eval_batch is called first, "
                f"and here none was; call engine.dsx.settle() before the first step, or {_ADVICE}"
            )

    def _begin(self) -> Tensor:
        """Set anchors and slots from this cluster's masters; return their digests `[F, 4]`."""
        fragments = self._adapter.fragments
        digests = torch.zeros(len(fragments), NUMBERS, dtype=torch.int64)
        with Digests() as digest:
            for fragment in fragments:
                start = self._place_of(fragment.id)
                self._adapter.read(fragment.id, start)
                self._begin_from(fragment.id, start)
                if self._transport.seat.num_clusters > 1:
                    digests[fragment.id] = digest.of(start)
        return digests

    def _place_of(self, fragment: int) -> Tensor:
        """Return where masters are brought to: the anchor, or work space if there is none."""
        if self._method.outer_optimizer.keeps_anchor:
            return self._state.anchor[fragment]
        return self._state.whole(fragment, "work")

    def _begin_from(self, fragment: int, start: Tensor) -> None:
        slots = self._state.slots[fragment]
        self._method.delay.begin(start, slots.delay)
        if "start" in slots.staleness:
            slots.staleness["start"].copy_(start)

    def _ask(self, own: Tensor) -> Pending:
        """Start telling the digests of all fragments to all, in one message each."""
        held = [fragment.id for fragment in self._adapter.fragments if fragment.numel]
        if not held:
            return Arrived(torch.empty(0))
        everyone = [own.clone() for _ in self._transport.seat.ids]

        def exchange() -> Exchange:
            yield to_all([own], [[theirs] for theirs in everyone])
            return torch.stack(everyone)

        return self._transport.submit(Submission(held[0], 0, START), exchange())

    def _takers(self, everyone: Tensor) -> dict[int, list[int]]:
        """Return who has something else than the first, by fragment of which anybody has."""
        if not everyone.numel():
            return {}
        apart = (everyone != everyone[FIRST]).any(-1)  # [C, F]
        takers: dict[int, list[int]] = {}
        for place, fragment in torch.nonzero(apart).tolist():
            takers.setdefault(fragment, []).append(place)
        return dict(sorted(takers.items()))

    def _agree(self, takers: Mapping[int, list[int]]) -> tuple[dict[int, list[int]], int, int, int]:
        """Return `takers` of all of the stage's shards, and of the cluster the bytes that go and
        come, and how many shards of fragments differ in any cluster.

        Collective in the cluster; every rank sends and takes what differs in its own shard.
        """
        flags = torch.zeros(len(self._adapter.fragments), self._transport.seat.num_clusters)
        for fragment, places in takers.items():
            flags[fragment, places] = 1
        apart: dict[int, list[int]] = {}
        for fragment, place in torch.nonzero(self._adapter.ranks.max_over_ranks(flags)).tolist():
            apart.setdefault(fragment, []).append(place)
        own = [*self._own_bytes(takers), len(takers)]
        sent, received, anywhere = self._sum_over_cluster(own)
        return apart, sent, received, anywhere

    def _own_bytes(self, takers: Mapping[int, list[int]]) -> list[int]:
        """Return what this rank sends and receives."""
        own, sizes = self._transport.seat.position, [f.numel for f in self._adapter.fragments]
        sent = sum(sizes[f] for f, places in takers.items() if own in (FIRST, *places[:-1]))
        return [4 * sent, 4 * sum(sizes[f] for f, places in takers.items() if own in places)]

    def _sum_over_cluster(self, values: list[int]) -> list[int]:
        """Return the sums over all ranks of the cluster, a pipeline's stages together."""
        (rank, count), stage = self._adapter.ranks.shard, self._adapter.stage
        own = torch.zeros(len(values), stage.count * count, dtype=torch.float64)
        own[:, stage.index * count + rank] = torch.tensor(values, dtype=torch.float64)
        return [int(total) for total in self._adapter.ranks.max_over_stages(own).sum(1)]

    def _sending(self, takers: Mapping[int, list[int]]) -> Iterator[None]:
        """Send, on a thread of its own, while all who send less, or nothing, wait together."""
        device = torch.cuda.current_device() if self._adapter.pins_host_memory else None

        def send() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # of this thread
            self._send(takers)
            if device is not None:
                torch.cuda.synchronize(device)

        if device is not None:
            torch.cuda.synchronize(device)
        thread, sent = Fifo("dsx-start"), Future[None]()
        thread.submit(sent, send)
        thread.end_soon()
        what = f"masters of cluster {self._transport.seat.ids[FIRST]}"
        yield from until_all_are_done(what, sent, self._adapter.ranks, self._transport)

    @torch.no_grad()
    def _send(self, takers: Mapping[int, list[int]]) -> None:
        """Pass the first member's masters along to those that have others."""
        own = self._transport.seat.position
        what = f"masters of cluster {self._transport.seat.ids[FIRST]}, of this rank"
        progress = Progress(what, max(self._own_bytes(takers)), self._speaks)
        for fragment, places in takers.items():
            start = self._place_of(fragment)
            if own == FIRST:
                self._adapter.read(fragment, start)
            self._transport.spread(fragment, start, (FIRST, *places), progress.moved)
            if own in places:
                self._adapter.write(fragment, start)
                self._begin_from(fragment, start)

    @property
    def _speaks(self) -> bool:
        return self._adapter.ranks.shard[0] == 0 and self._adapter.stage.index == 0

    def _tell(self, apart: Mapping[int, list[int]], amount: int) -> None:
        """Say what differs, where, and what becomes of it."""
        if not (self._speaks and amount):
            return
        ids = self._transport.seat.ids
        clusters = ", ".join(str(ids[m]) for m in sorted({m for ms in apart.values() for m in ms}))
        names = ", ".join(map(self._adapter.stage.name_of, list(apart)[:3]))
        names += ", ..." if len(apart) > 3 else ""
        when = "now"
        if self.is_open:
            when = "when the model is first used, unless a checkpoint is loaded before"
        logger.log(
            logging.WARNING if amount >= _IS_LARGE else logging.INFO,
            "the weights are not the same in all clusters: %d of %d fragments (%s) differ in "
            "cluster(s) %s; cluster %d's are sent there %s, %s: %s",
            len(apart), len(self._adapter.fragments), names, clusters, ids[FIRST], when,
            format_bytes(amount), _ADVICE,
        )  # fmt: skip
