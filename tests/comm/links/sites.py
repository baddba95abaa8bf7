"""Clusters as threads of one process, over links, whose members may be lost."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from dsx.comm.elastic import ElasticTransport
from dsx.comm.links.clerk import Clerk
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.rank_views import Board, FirstRankViews
from dsx.core.membership import Member, Membership, Seat
from dsx.core.transport import PeerLost
from dsx.engines.torch import TorchAdapter
from dsx.method.method import Method
from dsx.outer.donor import FIRST, Donor
from dsx.outer.healing import Healing
from dsx.outer.loop import OuterLoop
from dsx.outer.parcel import hash_of
from dsx.outer.return_refusal import why_not
from dsx.outer.shared_state import saved_names
from dsx.training.dealing import follow_boundaries
from tests.comm.links.clusters import Line
from tests.comm.links.fates import NEVER, Doomed, Fate


def members(epoch: int, ids: Sequence[int], num_clusters: int = 3) -> Membership:
    return Membership(epoch, tuple(Member(id) for id in ids), tuple(range(num_clusters)))


class ToldViews:
    """Whoever tests says who is left."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Membership | PeerLost] = queue.Queue()
        self.reported: list[PeerLost] = []
        self.waits = False

    def put(self, view: Membership | PeerLost) -> None:
        self._queue.put(view)

    def next(self, epoch: int, seconds: float) -> Membership | None:
        try:
            found = self._queue.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, PeerLost):
            raise found
        return found

    def report(self, lost: PeerLost) -> None:
        self.reported.append(lost)

    def close(self) -> None:
        pass


class WithCopies(TorchAdapter):
    """As if weights were copies of the masters: `is_behind` where they are of before."""

    is_behind = False

    def write(self, fragment: int, source: Tensor) -> None:
        """Overwrite masters, and no weights."""
        super().write(fragment, source)
        self.is_behind = True

    def sync_model_weights(self) -> None:
        """Bring the weights to the masters."""
        super().sync_model_weights()
        self.is_behind = False


class Site:
    """One cluster: its link, its views, its model."""

    def __init__(self, id: int, model: nn.Module, method: Method, **options: Any) -> None:
        self.id, self.model, self.method = id, copy.deepcopy(model), method
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.link = Link(id, 0, None, LinkOptions(**options))
        self.views: Any = ToldViews()
        self.clerk: Clerk | None = None
        self.is_over = threading.Event()
        self.transport: ElasticTransport | None = None
        self.loop: OuterLoop | None = None
        self.all = [self]
        self.cut_at = 1 << 30  # the step of the first launch that its end has cut short
        self.epochs: list[int] = []  # at each step, by the end of it
        self.hashes: dict[int, str] = {}  # of the anchors, at each step
        self.waits: dict[int, float] = {}  # seconds of each step in the loop
        self.members_at: dict[int, tuple[int, ...]] = {}
        self.processes: dict[int, int] = {}
        self.healing: Healing | None = None
        self.donor: Donor | None = None
        self.batches: Any = None  # which is dealt between the clusters, if a test has set it
        self.saved: dict[str, Tensor] = {}  # its own checkpoint, if it has one

    def has_committed(self, before: int) -> bool:
        """Whether it has submitted all launches before that number, and holds their means."""
        if self.is_over.is_set():
            return True
        if self.transport is None:
            return False
        under_way = self.transport._under_way
        with under_way.lock:
            is_there = under_way.last >= before - 1
            return is_there and min(under_way.launches, default=before) >= before

    def await_commits(self, before: int) -> None:
        """Return once all that go on have committed those; AssertionError after 20 s."""
        until = time.monotonic() + 20
        while not self.is_over.is_set() and not all(s.has_committed(before) for s in self.all):
            assert time.monotonic() < until, f"launches before {before} are not committed"
            time.sleep(0.01)

    def end(self) -> None:
        """As a kill does: the connections are closed, nothing is said."""
        self.is_over.set()
        if self.clerk is None:
            self.views.put(PeerLost("this site has been killed"))
        else:
            self.clerk.close()  # it has not finished, so nobody hears of it
            self.board.tell(PeerLost("this site has been killed"))
        self.link.close()

    def follow_log(
        self, incarnations: dict[int, int], arbiter: int | None, suspect: float, joins: bool = False
    ) -> None:
        """Let a clerk say who the members are."""
        self.board = board = Board(None)
        self.processes = incarnations
        self.clerk = Clerk(self.link, incarnations, arbiter, suspect, board.tell, board.lost, joins)
        self.views = FirstRankViews(board, self.link)

    def heal(self, loop: OuterLoop, rate_mbit: float | None = None) -> None:
        """Join those who train."""
        clerk, transport = self.clerk, self.transport
        assert clerk is not None and transport is not None

        def clusters() -> tuple[int, ...]:
            until = time.monotonic() + 20
            while clerk.contributors is None:
                assert time.monotonic() < until, "nobody has taken the request to join"
                time.sleep(0.02)
            return clerk.contributors

        names = saved_names(loop)
        held = lambda name: self.saved.get(names.get(name, ""))  # noqa: E731
        self.healing = Healing(
            loop, lambda cluster, body: self.link.ask((cluster, 0), body), clusters,
            lambda: transport.first_own, clerk.ready, rate_mbit, 20.0, True, transport.give_sign,
            lambda: loop.notices.places.may_come, held if self.saved else None,
        )  # fmt: skip
        loop.notices.places.process = 1 + self.link.incarnation % (1 << 40)
        self.healing.heal()
        loop.notices.places.begin_reading()

    def train(
        self,
        num_steps: int,
        compute_loss: Callable[[nn.Module, int, int], Tensor],
        num_clusters: int,
        fate: Fate,
        before: Callable[[Site, int], object],
        joins: bool = False,
    ) -> None:
        """Train until the end, or until this site is killed."""
        adapter = WithCopies(
            self.model, self.optimizer, self.method.fragments, self.method.schedule.backwards
        )
        numbers = [fragment.id for fragment in adapter.fragments]
        everyone = tuple(range(num_clusters))
        ids = [self.id] if joins else everyone
        first = tuple(Member(id, process=self.processes.get(id, 0)) for id in ids)
        seat = Seat(Membership(0, first, everyone), self.id)
        self.transport = ElasticTransport(
            lambda seat, part: Doomed(self, seat, part, fate, numbers), seat, self.views, 20.0,
            20.0, follows=joins,
        )  # fmt: skip
        self.loop = OuterLoop(self.method, adapter, self.transport)
        self.donor = Donor(self.loop, why_not(self.method))
        donor, places = self.donor, self.loop.notices.places
        if self.batches is not None:
            places.follow("data", self.batches, self.id, num_clusters, 16)
            places.coming, places.is_reading = lambda: donor.healing, not joins
            follow_boundaries(self.loop)
        self.link.serve(lambda *request: donor.serve(*request), FIRST)
        try:
            self.loop.start(keeps_masters=joins)
            if joins:
                self.heal(self.loop)
                assert not adapter.is_behind, "masters have followed, and weights have not"
            for step in range(self.loop.history.step + 1, num_steps + 1):
                before(self, step)
                self.optimizer.zero_grad()
                compute_loss(self.model, self.id, step).backward()
                self.optimizer.step()
                began = time.monotonic()
                self.loop.after_inner_step()
                self.waits[step] = time.monotonic() - began
                adapter.end_inner_step()
                self.hashes[step] = hash_of(b"".join(
                    anchor.numpy().tobytes() for anchor in self.loop.state.anchor
                ))  # fmt: skip
                self.members_at[step] = self.transport.seat.ids
                self.epochs.append(self.transport.seat.membership.epoch)
            self.loop.drain()
        except PeerLost:
            if not self.is_over.is_set():
                raise
        finally:
            if self.clerk is not None:
                self.clerk.close()
            self.transport.close()


def run(
    method: Method,
    model: nn.Module,
    compute_loss: Callable[[nn.Module, int, int], Tensor],
    num_steps: int,
    num_clusters: int = 3,
    fates: dict[int, Fate] | None = None,
    before: Callable[[Site, int], object] = lambda site, step: None,
    watch: Callable[[list[Site]], object] = lambda sites: None,
    by_log: bool = False,
    arbiter: int | None = None,
    suspect_seconds: float = 30.0,
    again: int | None = None,
    begin_again: threading.Event | None = None,
    batches_of: Callable[[int], Any] = lambda id: None,
    line: Callable[[Line], object] | None = None,
    quorum_wait_seconds: float = 0.0,
    has_saved: bool = False,
) -> list[Site]:
    """Train all, each on a thread of its own; `watch` runs beside them.

    `by_log`: clerks say who the members are, else whoever watches does. The cluster `again` is
    started again once it has ended, and not before `begin_again`: its new site comes last. `line`
    is given the one line on which all call the first site. `has_saved`: whoever is started again
    has a checkpoint of where it has ended.
    """
    options = {"grace_seconds": 0.2, "suspect_seconds": suspect_seconds}
    sites = [Site(m, model, method, **options) for m in range(num_clusters)]
    lines = [Line(sites[0].link.port)] if line is not None else []
    for site in sites:
        site.batches, site.all = batches_of(site.id), sites
        for other in sites:
            if other is not site:
                called = other.id < site.id
                address = f"127.0.0.1:{other.link.port}" if called else None
                address = lines[0].address if called and lines and not other.id else address
                site.link.expect(other.id, 0, address)
    for site in sites if by_log else ():
        incarnations = {other.id: other.link.incarnation for other in sites}
        site.follow_log(incarnations, arbiter, suspect_seconds)
        assert site.clerk is not None
        site.clerk.quorum.seconds = lambda: quorum_wait_seconds
    if line is not None:
        line(lines[0])
    try:
        with ThreadPoolExecutor(num_clusters + 2) as threads:
            watching = threads.submit(watch, sites)
            done = [
                threads.submit(
                    site.train, num_steps, compute_loss, num_clusters,
                    (fates or {}).get(site.id, NEVER), before,
                )
                for site in sites
            ]  # fmt: skip
            if again is not None:
                assert sites[again].is_over.wait(240)
                assert begin_again is None or begin_again.wait(240)
                site = _started_again(sites, sites[again], options, arbiter, suspect_seconds)
                site.batches = batches_of(site.id)
                site.saved = _state(sites[again]) if has_saved else {}
                sites.append(site)
                done.append(threads.submit(
                    site.train, num_steps, compute_loss, num_clusters, NEVER, before, True
                ))  # fmt: skip
            for one in done:
                one.result(120)
            watching.result(10)
    finally:
        for site in sites:
            site.link.close()
        for each in lines:
            each.close()
    return sites


def _state(site: Site) -> dict[str, Tensor]:
    """What a checkpoint of where a site has ended holds of its outer state."""
    loop = site.loop
    assert loop is not None
    fragments = [fragment.id for fragment in loop.adapter.fragments]
    named = [(f"{n}/{p}", t) for p in fragments for n, t in loop.state.named_state(p).items()]
    return {name: tensor.clone() for name, tensor in named}


def _started_again(
    sites: Sequence[Site],
    victim: Site,
    options: dict[str, Any],
    arbiter: int | None,
    suspect: float,
) -> Site:
    """Return a new site of a cluster, with a model of its own, which asks to join the others."""
    model = copy.deepcopy(victim.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    site = Site(victim.id, model, victim.method, **options)
    for other in sites:
        if other.id != site.id:
            site.link.expect(other.id, 0, f"127.0.0.1:{other.link.port}")
    incarnations = {other.id: 0 for other in sites} | {site.id: site.link.incarnation}
    site.follow_log(incarnations, arbiter, suspect, joins=True)
    return site
