"""All ranks of a host are called at one port."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm.interfaces import own_address
from dsx.comm.links import host_port
from dsx.comm.links.host_port import HostGateway, Where, open_on_host
from dsx.comm.links.link import Link
from dsx.comm.links.meeting import Met, meet_peers, open_meeting, wait_for_peers
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.settings import LinkSettings
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from tests.comm.links.test_relay import Relay, folders, relay
from tests.distributed import free_port

SECONDS = 20.0
__all__ = ["folders", "relay"]


def settings_at(port: int) -> LinkSettings:
    return LinkSettings(members=(f"berlin=127.0.0.1:{port}", "oslo"), port=port)


@pytest.fixture
def stack() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_ranks(
    stack: ExitStack, settings: LinkSettings, size: int, elsewhere: tuple[int, ...] = ()
) -> list[tuple[Link, Where] | Exception]:
    """Open berlin's ranks, as their processes would; those `elsewhere`, the first, are another
    host's, which is told of all.
    """
    store: Any = dist.HashStore()
    here = [rank for rank in range(size) if rank not in elsewhere]
    if elsewhere:
        for rank in here:
            store.set(f"hosts/for/{rank}", json.dumps({"value": here}))

    def open_one(rank: int) -> tuple[Link, Where] | Exception:
        try:
            info = RankInfo(0, 2, rank, size)
            return open_on_host(settings, info, store, "127.0.0.1", SECONDS)
        except (OSError, PeerLost) as error:
            return error

    with ThreadPoolExecutor(len(here)) as threads:
        opened = list(threads.map(open_one, here))
    for each in opened:
        if isinstance(each, tuple):
            stack.callback(each[0].close)
            for held in each[0].held:
                if isinstance(held, HostGateway):
                    stack.callback(held.close)
    return opened


def oslo(stack: ExitStack, settings: LinkSettings, rank: int) -> Link:
    link, where = open_on_host(settings, RankInfo(1, 2, rank, 3), None, "127.0.0.1", SECONDS)
    stack.callback(link.close)
    assert where == Where(None)  # it only calls
    return link


def ask(caller: Link, rank: int, where: Where, called: Link) -> bytes:
    """Call a rank, and return who answers."""
    called.serve(lambda asker, body, answer: answer(str(called.rank).encode()))
    called.expect(1, caller.rank, None)
    caller.expect(0, rank, where.address, slot=where.slot)
    caller.wait_for(0, rank, SECONDS)
    return caller.ask((0, rank), b"who").result(SECONDS)


def test_callers_reach_the_rank_that_they_mean_at_the_only_port(stack: ExitStack) -> None:
    settings = settings_at(free_port())
    opened: Any = open_ranks(stack, settings, 3)
    address = settings.address_of(0)
    assert [where for _, where in opened] == [Where(address, slot) for slot in range(3)]
    for rank, (link, where) in enumerate(opened):
        assert ask(oslo(stack, settings, rank), rank, where, link) == str(rank).encode()
    for link, _ in opened:  # ranks themselves are not to be called from elsewhere
        assert link.port != settings.port


def test_one_rank_listens_itself(stack: ExitStack) -> None:
    settings = settings_at(free_port())
    link, where = open_on_host(settings, RankInfo(0, 2, 0, 1), None, "127.0.0.1", SECONDS)
    stack.callback(link.close)
    assert (link.port, where) == (settings.port, Where(settings.address_of(0)))


def test_a_second_host_is_called_where_it_reaches_the_other_members(stack: ExitStack) -> None:
    """Not at its address inside the site, where the first host is; or as it is told."""
    port, far = free_port(), "192.0.2.1"  # an address that is no host's
    beside = replace(settings_at(port), members=(f"berlin={far}:{port}", f"oslo=127.0.0.7:{port}"))
    beyond = replace(beside, members=(f"berlin=127.0.0.1:{port}", f"oslo={far}:{port}"))
    for settings, interface in [
        (beside, None),
        (beyond, "lo"),
        (replace(beyond, host="127.0.0.1"), None),
    ]:
        store: Any = dist.HashStore()
        store.set("hosts/for/1", json.dumps({"value": [1]}))
        info = RankInfo(0, 2, 1, 2)
        link, where = open_on_host(settings, info, store, far, SECONDS, interface)
        link.close()
        assert where == Where(f"127.0.0.1:{port}")


def test_an_address_is_of_the_first_host_that_is_known_and_ipv4_where_it_has_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert own_address(["no-such-host.invalid", "127.0.0.1"], None) == "127.0.0.1"
    assert own_address(["localhost"], None) == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="clusters.interface='ib7' is no interface with an add"):
        own_address(["127.0.0.1"], "ib7")


def test_a_second_host_is_called_at_its_own_address_and_the_same_port(stack: ExitStack) -> None:
    settings = settings_at(free_port())
    opened: Any = open_ranks(stack, settings, 4, elsewhere=(0, 1))
    assert [where for _, where in opened] == [
        Where(f"127.0.0.1:{settings.port}", slot) for slot in range(2)
    ]
    caller = oslo(stack, settings, 2)
    assert ask(caller, 3, opened[1][1], opened[1][0]) == b"3"


def test_a_port_that_is_taken_is_named_by_all(stack: ExitStack) -> None:
    settings = settings_at(free_port())
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.port))
        other.listen()
        first, second = open_ranks(stack, settings, 2)
    assert isinstance(first, OSError) and str(settings.port) in str(first)
    assert f"process {os.getpid()}" in str(first)
    assert isinstance(second, PeerLost) and "rank 0 of this host cannot start" in str(second)


def test_a_rank_that_does_not_come_is_named(stack: ExitStack) -> None:
    store: Any = dist.HashStore()
    with pytest.raises(
        PeerLost, match=r"waits for its rank\(s\) 1, which did not come within 0.2 s"
    ):
        open_on_host(settings_at(free_port()), RankInfo(0, 2, 0, 2), store, "127.0.0.1", 0.2)


def test_clusters_that_only_call_reach_each_other_at_a_relay(
    stack: ExitStack, folders: dict[str, Path], relay: Relay
) -> None:
    """Two ranks each, by their names; the meeting, and the peers."""
    names, at = ("site-a", "site-b"), f"127.0.0.1:{relay.port}"

    def run(place: tuple[int, int]) -> bytes:
        cluster, rank = place
        keys = str(folders[names[cluster]])
        settings = LinkSettings("curve", names, keys, port=ports[cluster], relay=at)
        info = RankInfo(cluster, 2, rank, 2)
        link, where = open_on_host(settings, info, own[cluster], "127.0.0.1", SECONDS)
        stack.callback(link.close)
        for held in link.held:
            if isinstance(held, HostGateway):
                stack.callback(held.close)
        assert where == Where(None, rank)
        store = open_meeting(settings, info, link, SECONDS)
        met = meet_peers(store, own[cluster], link, where, info, SECONDS)
        wait_for_peers(link, [1 - cluster], SECONDS)
        assert met.peers[cluster] == (None, rank, link.incarnation)
        assert (met.own is None) == (rank > 0)
        if rank == 0:  # one of them serves the meeting
            return b""
        link.serve(lambda asker, body, answer: answer(str(asker).encode()))
        return link.ask((1 - cluster, rank), b"who").result(SECONDS)

    ports, own = (free_port(), free_port()), (dist.HashStore(), dist.HashStore())
    places = [(m, r) for m in range(2) for r in range(2)]
    with ThreadPoolExecutor(len(places)) as threads:
        assert list(threads.map(run, places)) == [b"", b"(0, 1)", b"", b"(1, 1)"]
    assert relay.has_said("site-a has registered from 127.0.0.1: rank-0.site-a.dsx, rank-1.site-a")


def wait_for(what: Any) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_gateway_that_ends_is_started_anew(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a process has to start meanwhile, which on a busy machine takes longer than a connection may
    monkeypatch.setattr(LinkOptions, "grace_seconds", SECONDS)
    settings = settings_at(free_port())
    opened: Any = open_ranks(stack, settings, 2)
    caller = oslo(stack, settings, 1)
    ask(caller, 1, opened[1][1], opened[1][0])
    (gateway,) = (held for held in opened[0][0].held if isinstance(held, HostGateway))
    first = gateway.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert caller.ask((0, 1), b"who").result(SECONDS) == b"1"
    wait_for(lambda: gateway.pid != first)
    assert f"listens at port {settings.port} again" in caplog.text
    gateway.close()
    time.sleep(0.3)
    assert gateway.pid is not None and not os.path.exists(f"/proc/{gateway.pid}")


def test_one_that_never_starts_again_is_given_up(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_port, "_PAUSE_SECONDS", 0.001)
    settings = settings_at(free_port())
    opened: Any = open_ranks(stack, settings, 2)
    (gateway,) = (held for held in opened[0][0].held if isinstance(held, HostGateway))
    monkeypatch.setattr(gateway, "start", lambda: (_ for _ in ()).throw(OSError("port is taken")))
    os.kill(gateway.pid or 0, signal.SIGKILL)
    wait_for(lambda: "given up" in caplog.text)
    assert caplog.text.count("does not start again: port is taken") == 5


def test_first_ranks_alone_meet_and_others_have_a_store_of_their_number(stack: ExitStack) -> None:
    """Two clusters of three ranks: what goes through the gateway is two connections of each."""
    settings = settings_at(free_port())
    own = (dist.HashStore(), dist.HashStore())
    gateways: list[HostGateway] = []

    def run(place: tuple[int, int]) -> tuple[Any, Met]:
        cluster, rank = place
        info = RankInfo(cluster, 2, rank, 3)
        link, where = open_on_host(settings, info, own[cluster], "127.0.0.1", SECONDS)
        stack.callback(link.close)
        for held in link.held:
            if isinstance(held, HostGateway):
                gateways.append(held)
                stack.callback(held.close)
        store: Any = open_meeting(settings, info, link, SECONDS)
        assert link.process_at((0, 0)) is None or rank == 0
        met = meet_peers(store, own[cluster], link, where, info, SECONDS)
        wait_for_peers(link, [1 - cluster], SECONDS)
        store.set(f"of {cluster}", str(rank))
        store.wait(["of 0", "of 1"], timedelta(seconds=SECONDS))
        return store.multi_get(["of 0", "of 1"]), met

    places = [(cluster, rank) for cluster in range(2) for rank in range(3)]
    with ThreadPoolExecutor(len(places)) as threads:
        found = dict(zip(places, threads.map(run, places), strict=True))
    for (cluster, rank), (values, met) in found.items():
        assert values == [str(rank).encode()] * 2  # of the ranks of one number alone
        address = settings.address_of(0)
        assert [met.peers[c][:2] for c in (0, 1)] == [(address, rank), (None, 0)]
        assert met.processes == found[1 - cluster, rank][1].processes
    assert gateways[0].num_joined == 2 * 3


def test_a_cluster_that_does_not_say_where_its_ranks_are_is_named_by_all(stack: ExitStack) -> None:
    settings = settings_at(free_port())
    own, shared = dist.HashStore(), dist.HashStore()
    opened: Any = open_ranks(stack, settings, 2)

    def meet(rank: int) -> str:
        link, where = opened[rank]
        with pytest.raises(PeerLost) as lost:
            meet_peers(shared, own, link, where, RankInfo(0, 2, rank, 2), 0.3)
        return str(lost.value)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, range(2))
    assert first == second and first.startswith("where the ranks of cluster(s) 1 can be called")
