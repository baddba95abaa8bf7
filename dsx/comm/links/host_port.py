"""The one port of a host: who of its ranks listens there, or starts the gateway that does.

A host whose cluster can be called has one port open (`link.port`), however many ranks it runs. One
rank listens there itself. Several listen on loopback, each at a port of the system's choice; the
first of them starts the gateway, which hands each caller to the rank it names, and starts it anew
where it has ended. Ranks of a cluster that only calls out listen on loopback, where nobody calls;
but where several clusters only call out, and there is a relay, their gateways register there, and
have a port on loopback for each rank that is called through it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from dsx.comm.address import bracketed, parse_address
from dsx.comm.interfaces import own_address
from dsx.comm.links.entrance import Limits
from dsx.comm.links.gateway_process import Event, GatewayLost, GatewayProcess
from dsx.comm.links.greetings import rank_name
from dsx.comm.links.link import Link
from dsx.comm.links.requests import Name
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.tcp import listen
from dsx.comm.links.trust import load_trust, open_link
from dsx.comm.through_first import through_first
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_LOOPBACK = "127.0.0.1"
_HERE = ("127.0.0.1", "localhost", "::1")
_ANYWHERE = (None, "0.0.0.0", "::")
_STARTS = 5  # of a gateway that ends, one after another
_PAUSE_SECONDS = 0.1  # for each one before
_STEADY_SECONDS = 60.0  # after which a start counts as having succeeded
logger = logging.getLogger(__name__)


class Meeting(Protocol):
    """What is said of where clusters meet, and by which interface they are reached."""

    @property
    def rendezvous(self) -> str:
        """ "env://" or "tcp://HOST:PORT"."""
        ...

    @property
    def interface(self) -> str | None:
        """Its name, if one is given."""
        ...


@dataclass(frozen=True)
class Where:
    """Where others call a rank: at `host:port`, None for nowhere, by its place on its host."""

    address: str | None
    slot: int = 0


def open_on_host(
    settings: LinkSettings,
    rank_info: RankInfo,
    store: dist.Store | None,
    master: str,
    deadline_seconds: float,
    interface: str | None = None,
) -> tuple[Link, Where]:
    """Return this rank's link, listening as its host has it, and where others call it.

    `store` is the cluster's own, where its ranks meet; None for one of one rank. `master` is the
    host of its first one. Beyond that host it is called at the address of `interface`, else at the
    one that leads to the other members. PeerLost if a rank does not say where it listens; OSError
    if the port is taken, and who has it; ValueError if there is no such interface.
    """
    own, rank, world_size = rank_info.cluster_id, rank_info.rank, rank_info.world_size
    address, is_relayed = settings.address_of(own), own in settings.through_relay
    if address is None and not is_relayed:
        return open_link(settings, own, rank, world_size, host=_LOOPBACK), Where(None)
    here = [rank]
    if store is not None and world_size > 1:
        here = _ranks_of_this_host(store, rank_info, deadline_seconds)
    if here[0] != 0 and not is_relayed:
        others = [settings.address_of(m) for m in range(len(settings.members)) if m != own]
        hosts = [parse_address(f"tcp://{a}")[0] for a in others if a]
        towards = [host for host in hosts if host not in _HERE]  # those are forwarded elsewhere
        host = settings.host if settings.host not in _ANYWHERE else None
        host = host or own_address([*towards, master], interface)
        address = f"{bracketed(host)}:{settings.port}"
    if len(here) == 1 and not is_relayed:
        return open_link(settings, own, rank, world_size, settings.port), Where(address)
    link = open_link(settings, own, rank, world_size, host=_LOOPBACK)
    try:
        _hand_over(settings, rank_info, here, link, store, deadline_seconds)
    except BaseException:
        link.close()
        raise
    return link, Where(address, here.index(rank))


def where_alone(link: Link, meeting: Meeting, master: str) -> Where:
    """Return where a rank is called that listens by itself, as seen from where clusters meet."""
    has_own = meeting.rendezvous != "env://"
    meets = parse_address(meeting.rendezvous)[0] if has_own else master
    host = own_address([meets, master], meeting.interface)
    return Where(f"{bracketed(host)}:{link.port}")


class HostGateway:
    """A host's gateway, which is started anew where it has ended; `ranks` are by name."""

    def __init__(
        self,
        settings: LinkSettings,
        ranks: Mapping[str, tuple[int, str, int]],
        own: int,
        called: Sequence[Name] = (),
    ) -> None:
        """`called` are ranks of other clusters that cluster `own` calls through the relay."""
        self._settings, self._ranks, self._own = settings, dict(ranks), own
        self._called = {rank_name(settings.names[m], r): (m, r) for m, r in called}
        self.ways: dict[Name, str] = {}  # where to call them
        self.relay_trouble = ""  # why it is not registered there
        others = len(settings.names) - 1
        at_once = 4 * len(ranks) * others * (settings.streams + 1)  # old ones beside new ones
        most = max(Limits().most_connections, at_once)
        self._limits = Limits(most_connections=most, dscp=settings.dscp or None)
        self._listener: socket.socket | None = None
        self._gateway: GatewayProcess | None = None
        self._lock = threading.Lock()
        self._started_at = 0.0
        self._num_starts = 0
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process that listens now."""
        return None if self._gateway is None else self._gateway.pid

    @property
    def num_joined(self) -> int:
        """How many connections go through it now; it is asked, and GatewayLost if it is gone."""
        return 0 if self._gateway is None else int(self._gateway.counts()["joined"])

    def start(self) -> None:
        """Listen; OSError where that cannot be. The port stays open while no gateway runs."""
        host, port = self._settings.listens_at, self._settings.port
        if self._listener is None:
            self._listener = listen(host, port, self._limits.dscp)
        relay = self._relay()
        trust = load_trust(self._settings, self._own) if relay is not None else None
        sign = None if trust is None else trust.sign
        gateway = GatewayProcess(host, port, self._limits, sign, self._told, self._listener)
        gateway.start()
        if relay is None:
            gateway.update(ranks=self._ranks)
        else:
            name = self._settings.names[self._own]
            ways = gateway.update(self._ranks, dict.fromkeys(self._called, relay), [(*relay, name)])
            self.ways = {self._called[n]: f"{_LOOPBACK}:{port}" for n, port in ways.items()}
        with self._lock:
            self._gateway, self._started_at = gateway, time.monotonic()
            is_late = self._is_closed
        if is_late:
            gateway.stop()

    def close(self) -> None:
        """End it; connections through it with it."""
        with self._lock:
            self._is_closed = True
            gateway = self._gateway
        if gateway is not None:
            gateway.stop()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _relay(self) -> tuple[str, int] | None:
        relay = self._settings.relay
        if relay is None or self._own not in self._settings.through_relay:
            return None
        return parse_address(f"tcp://{relay}")

    def _told(self, event: Event) -> None:
        if event["event"] == "registered":
            self.relay_trouble = ""
            logger.info("registered at relay %s", event["text"])
        elif event["event"] != "ended":
            if self.relay_trouble != event["text"]:
                logger.warning("not registered at relay %s", event["text"])
            self.relay_trouble = event["text"]
        elif self.ways:  # the next one would have them elsewhere
            logger.error("its ways through relay %s are gone with it", self._settings.relay)
        elif not self._is_closed:
            threading.Thread(target=self._start_anew, name="dsx-gateway", daemon=True).start()

    def _start_anew(self) -> None:
        if time.monotonic() - self._started_at > _STEADY_SECONDS:
            self._num_starts = 0
        while self._num_starts < _STARTS and not self._is_closed:
            time.sleep(_PAUSE_SECONDS * self._num_starts)
            self._num_starts += 1
            try:
                self.start()
            except (OSError, GatewayLost) as error:
                logger.error("the gateway of this host does not start again: %s", error)
                continue
            logger.warning(
                "the gateway of this host had ended; it listens at port %d again, and cut "
                "connections come back", self._settings.port,
            )  # fmt: skip
            return
        self._stop_listening()
        if not self._is_closed:
            logger.error(
                "the gateway of this host is given up after %d starts: nobody can call its ranks "
                "at port %d any more, and connections that end do not come back", _STARTS,
                self._settings.port,
            )  # fmt: skip


def _hand_over(
    settings: LinkSettings,
    rank_info: RankInfo,
    here: list[int],
    link: Link,
    store: dist.Store | None,
    deadline_seconds: float,
) -> None:
    """Have callers handed to the ranks of this host, this one with them; note ways in the link."""
    own, rank = rank_info.cluster_id, rank_info.rank
    store = dist.HashStore() if store is None else store  # of one rank
    store.set(f"port/{rank}", str(link.port))
    started = f"gateway/{here[0]}"
    if rank != here[0]:
        what = f"the gateway that rank {here[0]} starts"
        told = json.loads(_get_all(store, [started], what, deadline_seconds)[0])
        if isinstance(told, str):
            raise PeerLost(f"rank {here[0]} of this host cannot start its gateway: {told}")
        link.ways = {(m, r): address for m, r, address in told}
        return
    said = _get_all(store, [f"port/{r}" for r in here], "the ports of its ranks", deadline_seconds)
    ports = dict(zip(here, map(int, said), strict=True))
    name, relayed = settings.names[own], settings.through_relay
    others = [m for m in relayed if m != own] if own in relayed else []
    ranks = {rank_name(name, r): (slot, _LOOPBACK, ports[r]) for slot, r in enumerate(here)}
    gateway = HostGateway(settings, ranks, own, [(m, r) for m in others for r in here])
    try:
        gateway.start()
    except (OSError, GatewayLost) as error:
        store.set(started, json.dumps(str(error) or repr(error)))
        raise
    link.ways = gateway.ways
    atexit.register(gateway.close)  # behind the link, which is registered later
    link.held.append(gateway)
    store.set(started, json.dumps([[m, r, address] for (m, r), address in link.ways.items()]))
    logger.info(
        "ranks %s of cluster %s are called at port %d of this host", here, name, settings.port
    )


def _ranks_of_this_host(
    store: dist.Store, rank_info: RankInfo, deadline_seconds: float
) -> list[int]:
    """Return the cluster's ranks that run here, this one with them, in order."""
    network = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    own = json.dumps([socket.gethostname(), network])  # containers may share either

    def grouped(hosts: list[str]) -> list[list[int]]:
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks.setdefault(host, []).append(rank)
        return [ranks[host] for host in hosts]

    return through_first(store, "hosts", rank_info, own, grouped, deadline_seconds)


def _get_all(store: dist.Store, keys: list[str], what: str, seconds: float) -> list[bytes]:
    try:
        with waiting_for(what, seconds):
            store.wait(keys, timedelta(seconds=seconds))
            return store.multi_get(keys)
    except RuntimeError as error:
        raise PeerLost(
            f"{what} did not come within {seconds:g} s (clusters.join_deadline_seconds): "
            f"{str(error).splitlines()[0]}"
        ) from error
