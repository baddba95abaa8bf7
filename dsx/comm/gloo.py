"""The transport over TCP: one gloo group per fragment, outside every torch.distributed world.

Groups are built by hand (`ProcessGroupGloo` over the rendezvous store) and never registered with
torch, so no collective of the inner engine can cross a cluster. Each fragment has its own group
and its own thread: gloo matches operations on one group silently by their order, and so a
fragment's transfers stay one FIFO while different fragments overlap.

A swap is point-to-point sends and receives with every peer. Every wait has the transport's
deadline; a peer that closes its connection or misses it becomes `PeerLost`.

Before each transfer the clusters tell each other what it is, over a group that all fragments
share: the n-th launch of one cluster must be the n-th of all. Clusters that chose different
fragments are so told at once, rather than waiting for each other on different groups.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.comm.base import PeerLost, Submission
from dsx.comm.reduce import HEADER_BYTES
from dsx.comm.swap import Exchange, Peers, Swap
from dsx.types import Stage

_WHOLE = Stage()


class GlooPending:
    """An exchange running on its fragment's thread."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.seconds = 0.0
        self.coding_seconds = 0.0
        self.future: Future[Tensor] = Future()

    def wait(self) -> Tensor:
        """Return the mean; the thread behind it keeps the deadline."""
        return self.future.result()


class Fifo:
    """One thread that runs submissions in order.

    A daemon: a process that fails must not stay alive until the deadline of what is in flight.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, future: Future[Tensor], task: Callable[[], Tensor]) -> None:
        """Run `task` after those before it; its result or error goes to `future`."""
        self._queue.put((future, task))

    def close(self) -> None:
        """Let the submitted tasks end, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits, whatever it is
                future.set_exception(error)


class Announcements:
    """What is about to be averaged, told to all peers before every transfer, in launch order.

    The number of a launch is the message's tag, so fragments' threads need not take turns.
    """

    def __init__(
        self, group: Any, cluster_id: int, num_clusters: int, deadline: float, stage: Stage
    ) -> None:
        self._group = group
        self._stage = stage
        self._peers = [m for m in range(num_clusters) if m != cluster_id]
        self._deadline_seconds = deadline
        self._launches = 0

    def take_number(self) -> int:
        """Return the number of a launch; called in launch order."""
        self._launches += 1
        return self._launches

    def agree(self, what: Submission, number: int) -> int:
        """Send every peer what is about to be averaged; PeerLost if one has something else.

        Returns the bytes sent. Costs one one-way latency, on the fragment's own thread.
        """
        until = time.monotonic() + self._deadline_seconds
        works = _Works(self._group, what.on(self._stage), until, self._deadline_seconds, tag=number)
        own = torch.tensor([what.fragment, what.step, what.purpose])
        theirs = {peer: torch.empty_like(own) for peer in self._peers}
        for peer in self._peers:
            works.receive(theirs[peer], peer)
            works.send(own, peer)
        works.wait()
        for peer, other in theirs.items():
            if not torch.equal(own, other):
                other_one = Submission(*other.tolist()).on(self._stage)
                raise PeerLost(
                    f"{what.on(self._stage)}, but cluster {peer} has {other_one}: the clusters "
                    "have lost step; give all of them the same configuration and the same number "
                    "of batches"
                )
        return HEADER_BYTES * len(self._peers)


class FragmentGroup:
    """One fragment's connections to its peers, one per other cluster."""

    def __init__(self, group: Any, cluster_id: int, num_clusters: int, deadline: float) -> None:
        self._group = group
        self._peers = Peers(cluster_id, num_clusters)
        self._deadline_seconds = deadline

    def swap(self, swap: Swap, label: str) -> int:
        """Send and receive what `swap` says; return the payload bytes sent."""
        until = time.monotonic() + self._deadline_seconds
        works = _Works(self._group, label, until, self._deadline_seconds)
        for peer in self._peers.others:
            for tensor in swap.incoming[peer]:
                works.receive(tensor, peer)
        for peer in self._peers.others:
            for tensor in swap.outgoing[peer]:
                works.send(tensor, peer)
        works.wait()
        return swap.bytes_sent(self._peers)

    def broadcast_(self, x: Tensor, label: str) -> None:
        """Overwrite `x` in place with cluster 0's."""
        until = time.monotonic() + self._deadline_seconds
        works = _Works(self._group, label, until, self._deadline_seconds)
        if self._peers.cluster_id == 0:
            for peer in self._peers.others:
                works.send(x, peer)
        else:
            works.receive(x, 0)
        works.wait()


class _Works:
    """Sends and receives of one phase; any failure of theirs becomes a `PeerLost`."""

    def __init__(
        self, group: Any, label: str, until: float, deadline_seconds: float, tag: int = 0
    ) -> None:
        self._group = group
        self._tag = tag
        self._label = label
        self._until = until
        self._deadline_seconds = deadline_seconds
        self._posted: list[tuple[int, Any]] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Post a send; nothing for an empty tensor."""
        self._post(self._group.send, tensor, peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Post a receive into `tensor`, in place; nothing for an empty one."""
        self._post(self._group.recv, tensor, peer)

    def wait(self) -> None:
        """Wait for all that was posted, until the phase's deadline."""
        for peer, work in self._posted:
            left = max(self._until - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise self._lost(peer, error) from None

    def _post(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
        if not tensor.numel():
            return
        try:
            self._posted.append((peer, operation([tensor], peer, self._tag)))
        except RuntimeError as error:  # gloo says at once that the connection is gone
            raise self._lost(peer, error) from None

    def _lost(self, peer: int, error: RuntimeError) -> PeerLost:
        what = "closed its connection"
        if time.monotonic() >= self._until:
            what = f"did not answer within {self._deadline_seconds:g} s (clusters.deadline_seconds)"
        reason = str(error).splitlines()[0].partition("] ")[2].partition(". ")[0]
        return PeerLost(f"{self._label}: cluster {peer} {what} (gloo: {reason or error})")


class GlooTransport:
    """Connects this rank to its peers of the same shard coordinate in the other clusters."""

    def __init__(
        self,
        fragments: Sequence[int],
        connect: Callable[[str], Any],
        cluster_id: int,
        num_clusters: int,
        deadline_seconds: float,
        stage: Stage = _WHOLE,
    ) -> None:
        self._stage = stage
        self.cluster_id = cluster_id
        self.num_clusters = num_clusters
        self._groups: dict[int, FragmentGroup] = {}
        self._fifos: dict[int, Fifo] = {}
        is_alone = num_clusters == 1 or not fragments
        self._announcements = Announcements(
            None if is_alone else connect("announcements"), cluster_id, num_clusters,
            deadline_seconds, stage,
        )  # fmt: skip
        for fragment in fragments:
            group = connect(stage.name_of(fragment)) if num_clusters > 1 else None
            self._groups[fragment] = FragmentGroup(
                group, cluster_id, num_clusters, deadline_seconds
            )
            self._fifos[fragment] = Fifo(f"dsx-fragment-{fragment}")

    def submit(self, what: Submission, exchange: Exchange) -> GlooPending:
        """Run the exchange on the fragment's thread and return at once."""
        group = self._groups[what.fragment]
        pending = GlooPending()
        number = self._announcements.take_number()

        def run() -> Tensor:
            pending.bytes_sent += self._announcements.agree(what, number)
            return _drive(group, what.on(self._stage), exchange, pending)

        self._fifos[what.fragment].submit(pending.future, run)
        return pending

    def broadcast(self, fragment: int, tensor: Tensor) -> None:
        """Overwrite `tensor` in place with cluster 0's."""
        if self.num_clusters > 1:
            group, sent = self._groups[fragment], GlooPending()
            label = f"{self._stage.name_of(fragment)}, outer state of cluster 0"

            def run() -> Tensor:  # in turn with the fragment's transfers
                group.broadcast_(tensor, label)
                return tensor

            self._fifos[fragment].submit(sent.future, run)
            sent.wait()

    def close(self) -> None:
        """Let running exchanges end and drop the connections."""
        for fifo in self._fifos.values():
            fifo.close()
        self._groups.clear()


def connect_gloo(
    store: dist.Store,
    cluster_id: int,
    num_clusters: int,
    deadline: timedelta,
    interface: str | None,
) -> Any:
    """Build an unregistered gloo group over `store`: one member per cluster, fully connected.

    Raises RuntimeError from gloo if a peer does not come within `deadline`.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
    options._timeout = deadline
    if interface is None:
        device = dist.ProcessGroupGloo.create_default_device()
    else:
        device = dist.ProcessGroupGloo.create_device(interface=interface)
    options._devices = [device]
    return dist.ProcessGroupGloo(store, cluster_id, num_clusters, options)


def _drive(group: FragmentGroup, label: str, exchange: Exchange, pending: GlooPending) -> Tensor:
    """Run one exchange to its end, with a swap for each one it yields."""
    started = time.perf_counter()
    on_messages = 0.0
    try:
        while True:
            swap = next(exchange)
            since = time.perf_counter()
            pending.bytes_sent += group.swap(swap, label)
            on_messages += time.perf_counter() - since
    except StopIteration as stop:
        pending.seconds = time.perf_counter() - started
        pending.coding_seconds = pending.seconds - on_messages
        return stop.value
