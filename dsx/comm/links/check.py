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

from dsx.comm.links.host_port import HostGateway, open_on_host
from dsx.comm.links.link import Link
from dsx.comm.links.meeting import address_to_call
from dsx.comm.links.requests import Answer, Name
from dsx.comm.links.settings import LinkSettings
from dsx.comm.topology import RankInfo
from dsx.comm.versions import about_me

_ANSWER_SECONDS = 5.0
_LINGER_SECONDS = 2.0
_LAST_SECONDS = 0.3
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

    @property
    def says(self) -> str:
        """What there is to say of it."""
        if self.problem is not None:
            return self.problem
        words = f"trusts this site, and is trusted; {1000 * self.latency_seconds:.1f} ms"
        if abs(self.clock_seconds) > _LATE_SECONDS:
            ahead = "ahead" if self.clock_seconds > 0 else "behind"
            words += f"; its clock is {abs(self.clock_seconds):.0f} s {ahead}"
        if self.version != _version():
            words += f"; it has dsx {self.version}, this site {_version()}"
        return words


def check_sites(settings: LinkSettings, own: int, seconds: float) -> list[Site]:
    """Return the other sites, as they were found; waits up to `seconds` for all of them.

    OSError if the port is taken here; ValueError for what is wrong with keys.
    """
    addresses = {m: settings.address_of(m) for m in range(len(settings.names))}
    link, _ = open_on_host(settings, RankInfo(own, len(addresses), 0, 1), None, "", seconds)
    gateways = [held for held in link.held if isinstance(held, HostGateway)]
    asked: set[Name] = set()

    def serve(asker: Name, body: bytes, answer: Answer) -> None:
        asked.add(asker)
        answer(json.dumps({"time": time.time(), "version": _version()}).encode())

    until = time.monotonic() + seconds
    try:
        link.serve(serve)
        others = [m for m in addresses if m != own]
        for other in others:
            way = link.ways.get((other, 0)) if other < own else None
            link.expect(other, 0, address_to_call(own, other, addresses) or way)

        def look(other: int) -> Site:
            way = _way(settings, own, other, addresses)
            site = _look(link, other, settings.names[other], way, until)
            if site.problem is not None and way.endswith(f" relay {settings.relay}"):
                site = replace(site, problem=_at_relay(gateways))
            return site

        with ThreadPoolExecutor(len(others)) as threads:
            found = list(threads.map(look, others))
        until += _LINGER_SECONDS  # they have to hear from this one, too
        while len(asked) < sum(s.problem is None for s in found) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(_LAST_SECONDS)  # in which the last answer leaves
    finally:
        link.close()
        for gateway in gateways:
            gateway.close()
    return found


def _look(link: Link, other: int, name: str, way: str, until: float) -> Site:
    try:
        link.wait_for(other, 0, max(until - time.monotonic(), 0.1))
        before = time.time()
        answered: Future[bytes] = link.ask((other, 0), b"{}")
        told = json.loads(answered.result(_ANSWER_SECONDS))
        after = time.time()
    except (TimeoutError, WaitedTooLong, RuntimeError) as error:
        why = str(error).partition(": ")[2] or "nothing was heard of it"
        if link.problems["a key of no member"] and way.startswith("calls here"):
            why += "; somebody has called whose key is not known here: dsx keys add its line"
        return Site(name, way, why)
    ahead = told["time"] - (before + after) / 2
    return Site(name, way, None, after - before, ahead, str(told["version"]))


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
