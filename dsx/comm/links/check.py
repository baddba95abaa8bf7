"""Whether the sites of a run can meet: keys, ports, clocks and versions, before a run is started.

Each site calls those it would call in a run, at the same time; through the relay, too, where it has
one. What has not answered within the deadline is told with the reason as far as it is known here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass, replace

from dsx.comm.links.desk import ASKED, visitor_rank
from dsx.comm.links.host_port import HostGateway, open_on_host
from dsx.comm.links.link import Link
from dsx.comm.links.meeting import address_to_call
from dsx.comm.links.requests import Answer, Name
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.trust import open_link
from dsx.comm.topology import RankInfo
from dsx.comm.versions import about_me

_ANSWER_SECONDS = 5.0
_LINGER_SECONDS = 2.0
_LAST_SECONDS = 0.3
_LOOK_SECONDS = 0.05
_LATE_SECONDS = 2.0  # of a clock: what is told of it


@dataclass(frozen=True)
class Site:
    """Another site as it was found. `problem` is None where a link stood.

    `clock_seconds`: how far its clock is ahead of this one; `latency_seconds`: there and back.
    """

    name: str
    way: str
    problem: str | None
    latency_seconds: float = 0.0
    clock_seconds: float = 0.0
    version: str = ""
    is_on: bool = False  # a run is, which its own check is not

    @property
    def says(self) -> str:
        """What there is to say of it."""
        if self.problem is not None:
            return self.problem
        words = f"trusts this site, and is trusted; {1000 * self.latency_seconds:.1f} ms"
        if self.is_on:
            return f"{words}; a run is on there"
        if abs(self.clock_seconds) > _LATE_SECONDS:
            ahead = "ahead" if self.clock_seconds > 0 else "behind"
            words += f"; its clock is {abs(self.clock_seconds):.0f} s {ahead}"
        if self.version != _version():
            words += f"; it has dsx {self.version}, this site {_version()}"
        return words


def check_sites(settings: LinkSettings, own: int, seconds: float) -> list[Site]:
    """Return how the sites but this one, cluster `own`, were found within `seconds`.

    It calls as a visitor, which takes nobody's place: where a run is on it is told so, and the run
    goes on. OSError if the port is taken here; ValueError for what is wrong with keys.
    """
    addresses = {m: settings.address_of(m) for m in range(len(settings.names))}
    asked: dict[Name, None] = {}  # the last one last

    def serve(asker: Name, body: bytes, answer: Answer) -> None:
        asked.pop(asker, None)
        asked[asker] = None
        answer(json.dumps({"time": time.time(), "version": _version()}).encode())

    until = time.monotonic() + seconds
    calling = open_link(settings, own, visitor_rank(), 1, host="127.0.0.1")
    called, gateways = calling, list[HostGateway]()
    try:
        calling.serve(serve)
        if addresses[own] is not None or own in settings.through_relay:
            called = _open_to_others(settings, own, seconds)
            gateways += [held for held in called.held if isinstance(held, HostGateway)]
            called.serve(serve)
        others = [m for m in addresses if m != own]

        def look(other: int) -> Site:
            way = _way(settings, own, other, addresses)
            relayed = called.ways.get((other, 0)) if other < own else None
            address = address_to_call(own, other, addresses) or relayed
            if address is not None:
                calling.expect(other, 0, address)
                site = _look(calling, (other, 0), settings.names[other], way, until)
            else:
                called.expect(other, 0, None)
                site = _wait(called, other, asked, settings.names[other], way, until)
            if site.problem is not None and way.endswith(f" relay {settings.relay}"):
                site = replace(site, problem=_at_relay(gateways))
            return site

        with ThreadPoolExecutor(len(others)) as threads:
            found = list(threads.map(look, others))
        until += _LINGER_SECONDS  # they have to hear from this one, too
        met = {m for m, s in zip(others, found, strict=True) if s.problem is None and not s.is_on}
        while not met <= {asker[0] for asker in asked.copy()} and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        time.sleep(_LAST_SECONDS)  # in which the last answer leaves
    finally:
        calling.close()
        called.close()
        for gateway in gateways:
            gateway.close()
    return found


def _open_to_others(settings: LinkSettings, own: int, seconds: float) -> Link:
    """Listen as the site's first rank would in a run."""
    first = RankInfo(own, len(settings.names), 0, 1)
    try:
        return open_on_host(settings, first, None, "", seconds)[0]
    except OSError as error:
        raise OSError(
            f"{error}; if a run of this site is on there, `dsx ctl status` says whom it reaches"
        ) from error


def _look(link: Link, whom: Name, name: str, way: str, until: float) -> Site:
    try:
        link.wait_for(*whom, max(until - time.monotonic(), 0.1))
        before = time.time()
        # a run's desk answers that, too
        answered: Future[bytes] = link.ask(whom, ASKED + b'{"verb": "status", "to": %d}' % whom[0])
        told = json.loads(answered.result(_ANSWER_SECONDS))
        after = time.time()
    except (TimeoutError, WaitedTooLong, RuntimeError) as error:
        why = str(error).partition(": ")[2] or "nothing was heard of it"
        if link.problems["a key of no member"] and way.startswith("calls here"):
            why += "; somebody has called whose key is not known here: dsx keys add its line"
        return Site(name, way, why)
    if "time" not in told:
        return Site(name, way, None, after - before, is_on=True)
    ahead = told["time"] - (before + after) / 2
    return Site(name, way, None, after - before, ahead, str(told["version"]))


def _wait(
    link: Link, other: int, asked: dict[Name, None], name: str, way: str, until: float
) -> Site:
    """Wait for a site that calls: its check, which is a visitor, or its run."""
    while time.monotonic() < until and link.process_at((other, 0)) is None:
        visitors = [asker for asker in asked.copy() if asker[0] == other]
        if visitors:
            return _look(link, visitors[-1], name, way, until)
        time.sleep(_LOOK_SECONDS)
    return _look(link, (other, 0), name, way, until)


def _way(settings: LinkSettings, own: int, other: int, addresses: Mapping[int, str | None]) -> str:
    address = address_to_call(own, other, addresses)
    if address is not None:
        return f"called at {address}"
    if addresses[own] is not None:
        return f"calls here, at {addresses[own]}"
    if own in settings.through_relay:
        return f"{'called' if other < own else 'calls here'} through relay {settings.relay}"
    return "nowhere: neither can be called"


def _at_relay(gateways: Sequence[HostGateway]) -> str:
    """Say why one was not met there: `dsx relay` tells nobody who else has registered."""
    trouble = next((gateway.relay_trouble for gateway in gateways), "")
    if trouble:
        return f"this site is not registered there: {trouble}"
    return (
        "this site is registered there, and nothing was heard of that one: it is not, or one of "
        "the two lacks the other's key"
    )


def _version() -> str:
    return str(about_me()["versions"].get("dsx", "unknown"))
