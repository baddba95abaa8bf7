"""Whether the address that a rank listens at leads to it from the other clusters.

gloo listens at one address of a host, that of `clusters.interface` or of the host's name, and tries
the others' until the deadline. On hosts with a fast network inside the site and a line to the
others the host's name is often of the fast one, which leads nowhere from other sites, or to another
host there that has the same private address. So before gloo connects, each rank listens at its
address for a moment, with a word of its own, and calls the others': who is not reached is known in
seconds, and all are told which host has to name another interface.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from dsx.comm.interfaces import addresses, interface_of
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost

_CALL_SECONDS = 10.0
_PAUSE_SECONDS = 0.2
_CALLS_AT_ONCE = 32
_WORD_BYTES = 16
_OF_NAME = "that of the host's name"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a rank listens, and what else its host has; `word` is what it says to who calls."""

    host: str
    address: str
    port: int
    word: str
    interface: str
    others: Mapping[str, str]  # addresses by interface
    is_named: bool  # clusters.interface is set

    @property
    def how(self) -> str:
        """Why it listens there."""
        return "clusters.interface" if self.is_named else _OF_NAME


class Listening:
    """Says its word to whoever calls at `address`, until it is closed."""

    def __init__(self, address: str, interface: str | None) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self._word = secrets.token_hex(_WORD_BYTES // 2)
        own, known = interface_of(address), addresses()
        others = {name: places[0] for name, places in known.items() if name not in (own, "lo")}
        self.place = Place(
            socket.gethostname(), address, self._socket.getsockname()[1], self._word, own, others,
            interface is not None,
        )  # fmt: skip
        self._is_closed = False
        threading.Thread(target=self._serve, name="dsx-reach", daemon=True).start()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # it is closed, or there are no descriptors left for a moment
                time.sleep(_PAUSE_SECONDS)
                continue
            with caller, suppress(OSError):
                caller.settimeout(_CALL_SECONDS)
                caller.sendall(self._word.encode())

    def __enter__(self) -> Listening:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or `accept` would wait on
        self._socket.close()


def require_reach(
    store: dist.Store, seat: Seat, address: str, interface: str | None, deadline: timedelta
) -> None:
    """Call every peer where it listens; PeerLost if neither of two reaches the other.

    Where one of them does, gloo may connect: that is a warning. `address` is where gloo listens
    here, "" if that is not known: nobody calls there then. Every rank of a number in all clusters
    calls this; RuntimeError if one does not within `deadline`.
    """

    def told(what: str) -> dict[int, Any]:
        if not seat.others:
            return {}
        keys = [f"{what}/{peer}" for peer in seat.others]
        store.wait(keys, deadline)
        return dict(zip(seat.others, map(json.loads, store.multi_get(keys)), strict=True))

    with ExitStack() as stack:
        own = _listen(stack, address, interface)
        store.set(f"place/{seat.position}", json.dumps(own and asdict(own)))
        places = {peer: Place(**place) for peer, place in told("place").items() if place}
        with ThreadPoolExecutor(_CALLS_AT_ONCE, "dsx-reach") as calls:
            answers = zip(places, calls.map(why_not, places.values()), strict=True)
        found = {str(p): describe(seat, p, places[p], why) for p, why in answers if why}
        store.set(f"reached/{seat.position}", json.dumps(found))
        # nobody stops to listen before all have called
        others = told("reached")
    others[seat.position] = found
    problems: dict[str, str] = {}  # of each cluster that is not reached, what the first one says
    for position, peers in sorted(others.items()):
        both = {p: text for p, text in peers.items() if str(position) in others[int(p)]}
        problems = both | problems
    if problems:
        raise PeerLost("; ".join(problems[p] for p in sorted(problems, key=int)))
    for text in found.values():
        logger.warning("%s; it reaches this one: gloo may connect from there", text)
    if own is not None and any(place.host != own.host for place in places.values()):
        _tell_of_interfaces(own)


def _listen(stack: ExitStack, address: str, interface: str | None) -> Place | None:
    """Listen until the stack ends; None where the address is not known, or cannot be taken."""
    if not address:
        return None
    try:
        return stack.enter_context(Listening(address, interface)).place
    except OSError as error:
        logger.debug("whether others reach %s is not looked at: %s", address, error)
        return None


def _tell_of_interfaces(own: Place) -> None:
    """Say, once a host, by which interface it is reached, and which one its cluster has inside."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    inside = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    why = "GLOO_SOCKET_IFNAME" if inside else _OF_NAME
    if not inside:
        with suppress(OSError):
            inside = interface_of(socket.gethostbyname(own.host))
    of_nccl = os.environ.get("NCCL_SOCKET_IFNAME")
    logger.warning(  # a script that has not set up logging shows it
        "host %s: the other clusters reach it by %s (%s, %s); inside the cluster gloo takes %s "
        "(%s)%s", own.host, own.interface or "an interface that is not known", own.address,
        own.how, inside or "what it finds", why,
        f", NCCL {of_nccl} (NCCL_SOCKET_IFNAME)" if of_nccl else "",
    )  # fmt: skip


def why_not(place: Place) -> str | None:
    """Return why a place does not lead to whoever listens there; None if it does."""
    until, why = time.monotonic() + _CALL_SECONDS, ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((place.address, place.port), left) as call:
                call.settimeout(left)
                said = _read(call)
        except TimeoutError:
            why = f"no answer in {_CALL_SECONDS:g} s"
        except OSError as error:  # a tunnel may come up with the first call
            why = os.strerror(error.errno) if error.errno else str(error)
            time.sleep(_PAUSE_SECONDS)
        else:
            return None if said == place.word else "another process answers there"
    return why or f"no answer in {_CALL_SECONDS:g} s"


def describe(seat: Seat, peer: int, place: Place, why: str) -> str:
    """Return what is wrong, and what to do about it at which host."""
    others = ", ".join(f"{name} ({address})" for name, address in place.others.items())
    where = f"{place.address} ({place.interface or 'of no known interface'}, {place.how})"
    return (
        f"cluster {seat.ids[peer]} listens at {where} on host {place.host}, and cluster "
        f"{seat.cluster_id} on host {socket.gethostname()} does not reach it there ({why}): name "
        f"the interface of {place.host} that leads to the other clusters, by clusters.interface or "
        f"--dsx-interface there ({others or 'it has no other'}), or open its TCP ports between the "
        "hosts"
    )


def _read(call: socket.socket) -> str:
    said = b""
    while len(said) < _WORD_BYTES:
        if not (more := call.recv(_WORD_BYTES - len(said))):
            break
        said += more
    return said.decode("ascii", "replace")
