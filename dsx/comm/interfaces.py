"""The network interfaces of this host with their addresses; as far as the system tells."""

from __future__ import annotations

import ipaddress
import socket
import struct
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
