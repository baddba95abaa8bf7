"""Where the clusters of a configuration meet: whether that can be found and reached from here.

A port of this host is bound for a moment, and never listened on; to another host's one connection
is opened, and closed at once, which dsx's store takes no notice of.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from ipaddress import ip_address

from dsx.comm.address import parse_address
from dsx.comm.interfaces import interface_of, own_address
from dsx.config.link import LinkConfig
from dsx.config.sections import ClustersConfig
from dsx.support.doctor.finding import Finding
from dsx.support.environment import interfaces

_SECONDS = 3.0


def look_at_meeting(clusters: ClustersConfig, link: LinkConfig) -> list[Finding]:
    """Return what holds of where clusters meet, and of `clusters.interface`."""
    if link.members:
        return _over_links(clusters, link)
    if clusters.rendezvous == "env://":
        text = (
            "env://: the clusters meet where the ranks of one launcher do (MASTER_ADDR, "
            "MASTER_PORT); nothing to look at before it starts"
        )
        return [Finding("ok", "rendezvous", text), *_interface(clusters, None)]
    host, port = parse_address(clusters.rendezvous)
    addresses = _resolve(host)
    if not addresses:
        text = (
            f"{clusters.rendezvous}: {host} is no name that this host can resolve within "
            f"{_SECONDS:g} s; write its address, or add the name to /etc/hosts or DNS"
        )
        return [Finding("STOP", "rendezvous", text), *_interface(clusters, None)]
    address = addresses[0]
    look = _here if _is_here(address) else _elsewhere
    return [look(clusters, address, port), *_interface(clusters, address)]


def _resolve(host: str) -> list[str]:
    """Return the addresses of a name, none if it has none or nobody answers in time."""
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found.extend(str(answer[4][0]) for answer in answers)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return list(found)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _bind(address: str, port: int) -> int:
    """Return the error of binding a port, 0 if it can be had; it is given back at once."""
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((address, port))
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def _connect(address: str, port: int) -> int:
    """Return the error of a connection, 0 if there is one; ETIMEDOUT after some seconds."""
    try:
        with socket.create_connection((address, port), timeout=_SECONDS):
            return 0
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        return error.errno or errno.EINVAL


def _is_here(address: str) -> bool:
    return _bind(address, 0) == 0


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _here(clusters: ClustersConfig, address: str, port: int) -> Finding:
    """Tell of a port of this host."""
    where = f"{clusters.rendezvous} is on this host"
    if _is_loopback(address):
        where += ", and no other host can reach it there"
    problem = _bind(address, port)
    if problem == errno.EACCES:
        fix = "give a port of 1024 or more"
        return Finding("STOP", "rendezvous", f"{where}; only root may listen on {port}; {fix}")
    if _connect(address, port) == 0:
        if clusters.store == "standalone" or clusters.cluster_id:
            return Finding("ok", "rendezvous", f"{where}, and somebody listens on port {port}")
        text = (
            f"{where}, and port {port} is taken, where the first rank of cluster 0 is to listen; "
            "end what listens there (a run that is left over?), or give another port"
        )
        return Finding("STOP", "rendezvous", text)
    if problem:
        text = f"{where}, and port {port} cannot be had: {os.strerror(problem)}; give another port"
        return Finding("STOP", "rendezvous", text)
    if clusters.store == "standalone":
        text = f"{where}; port {port} is free: start `dsx rendezvous --port {port}` before the run"
    else:
        text = f"{where}; port {port} is free for cluster 0 to listen on: start cluster 0 here"
    return Finding("ok", "rendezvous", text)


def _elsewhere(clusters: ClustersConfig, address: str, port: int) -> Finding:
    """Tell of a port of another host."""
    where = f"{clusters.rendezvous} is another host ({address})"
    problem = _connect(address, port)
    if problem == 0:
        return Finding("ok", "rendezvous", f"{where}, and port {port} answers")
    if problem == errno.ECONNREFUSED:
        first = "`dsx rendezvous`" if clusters.store == "standalone" else "cluster 0"
        text = (
            f"{where}, which refuses port {port}: nobody listens there, as before {first} is "
            f"started; a run waits {clusters.join_deadline_seconds:g} s for it"
        )
        return Finding("note", "rendezvous", text)
    text = (
        f"{where}, and port {port} cannot be reached from here: {os.strerror(problem)}; open the "
        "port in the firewalls between, or give an address that leads there (a VPN's)"
    )
    return Finding("STOP", "rendezvous", text)


def _over_links(clusters: ClustersConfig, link: LinkConfig) -> list[Finding]:
    """Tell of the member that all call first, and of the way from here to the others."""
    places = [member.partition("=")[::2] for member in link.members]
    called = [f"{name} ({address})" for name, address in places if address]
    where = f"at {called[0]}" if called else f"at the relay, {link.relay}"
    found = [Finding("ok", "rendezvous", f"over links the clusters meet {where}")]
    if clusters.interface is not None:
        return [*found, _named_interface(clusters.interface)]
    own = clusters.cluster_id
    towards = [
        parse_address(f"tcp://{address}")[0] for m, (_, address) in enumerate(places)
        if address and m != own
    ]  # fmt: skip
    if not towards:
        return found
    try:
        address = own_address(towards, None)
    except OSError as error:
        text = (
            f"no way from here to {', '.join(towards)} ({error.strerror or error}): look at the "
            "names in link.members, and at this host's routes"
        )
        return [*found, Finding("note", "interface", text)]
    name = interface_of(address) or "an interface that is not known"
    text = f"{name} ({address}) leads to the other members"
    return [*found, Finding("ok", "interface", text)]


def _named_interface(name: str) -> Finding:
    """Tell whether this host has what `clusters.interface` names."""
    names = interfaces()
    if name in names:
        return Finding("ok", "interface", f"{name} is there")
    text = (
        f"clusters.interface={name!r} is none of this host's: {', '.join(names)}; give one of "
        "them, by --dsx-interface or DSX_INTERFACE where it is launched on this host"
    )
    return Finding("STOP", "interface", text)


def _interface(clusters: ClustersConfig, address: str | None) -> list[Finding]:
    """Tell of the interface that gloo uses: the named one, or that of the host's name."""
    if clusters.interface is not None:
        return [_named_interface(clusters.interface)]
    if clusters.num_clusters == 1:
        return []
    names = interfaces()
    name = socket.gethostname()
    own = _resolve(name)
    leads = f"that of this host's name, {name}, which is {own[0] if own else 'not resolved'}"
    if own and not _is_loopback(own[0]):
        return [Finding("ok", "interface", leads)]
    others = [each for each in names if not each.startswith("lo")]
    fix = f"clusters.interface or --dsx-interface names another: {', '.join(others) or 'none here'}"
    text = f"{leads}: ranks of other hosts cannot connect to this one; {fix}"
    is_far = address is not None and not _is_here(address)
    return [Finding("STOP" if is_far else "note", "interface", text)]
