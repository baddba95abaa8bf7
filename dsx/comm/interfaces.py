"""The network interfaces of this host with their addresses; as far as the system tells."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_IPV6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # a scope that leads no further than the next host


def addresses() -> dict[str, list[str]]:
    """Return each interface's addresses by name, IPv4 first; none of its name where it has none."""
    found: dict[str, list[str]] = {}
    with suppress(OSError, AttributeError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    asked = struct.pack("256s", name.encode()[:15])
                    told = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
                    found.setdefault(name, []).append(socket.inet_ntoa(told[20:24]))
    with suppress(OSError):
        for line in _IPV6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL:
                address = str(ipaddress.IPv6Address(int(digits, 16)))
                found.setdefault(name, []).append(address)
    return found


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address, "" if none is known to."""
    own = address.removeprefix("::ffff:")
    return next((name for name, known in addresses().items() if own in known), "")


def own_address(towards: Sequence[str], interface: str | None) -> str:
    """Return this host's address of an interface, or of the one that leads to the first host.

    Of the hosts the first that is known here and has a route; IPv4 where it has that, as ranks
    listen there. ValueError if the interface is none of this host's, or has no address; OSError if
    no host has a route.
    """
    if interface is not None:
        known = addresses()
        if not known.get(interface):
            names = ", ".join(name for name in known if name != "lo") or "none"
            raise ValueError(
                f"clusters.interface={interface!r} is no interface with an address of this host: "
                f"{names}; give one of them, by --dsx-interface where it is launched on this host"
            )
        return known[interface][0]
    *first, last = [
        (host, family) for host in towards for family in (socket.AF_INET, socket.AF_UNSPEC)
    ]
    for host, family in first:
        with suppress(OSError):
            return _towards(host, family)
    return _towards(*last)


def _towards(host: str, wanted: int) -> str:
    family, *_, place = socket.getaddrinfo(host, 9, wanted, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as anywhere:
        anywhere.connect(place)  # sends nothing: the system says which address it would take
        return str(anywhere.getsockname()[0])
