"""Two sites of two hosts each, as namespaces: a fast network in a site, a slow line to the other.

A host has its own name, addresses, ssh server and /etc/hosts, in which its name, and that of its
neighbour, is of the fast network. Both sites have the same private addresses there, as sites do.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsx.bench.namespaces import (
    HOSTS,
    TestbedUnavailable,
    processes_in,
    remove_namespaces,
    require_tools,
    run_ip,
    signal_all,
)

NAMES = ("oslo-a", "oslo-b", "rome-a", "rome-b")
SSH_CONFIG = """
Host *
  IdentityFile /etc/ssh/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SSHD_CONFIG = """
HostKey /etc/ssh/host
AuthorizedKeysFile /etc/ssh/id.pub
PermitRootLogin yes
StrictModes no
PidFile none
UsePAM no
"""


def wan(host: int) -> str:
    """The address of a host on the line between the sites."""
    return f"203.0.113.{16 * host + 2}"


def lan(host: int) -> str:
    """The address of a host inside its site."""
    return f"192.168.1.{1 + host % 2}"


class SitesOfHosts:
    """Made and removed by `with`; TestbedUnavailable where this host cannot have it."""

    def __init__(self, folder: Path, mbit: int = 200) -> None:
        self._folder, self._mbit = folder, mbit
        self._spaces = [f"dsx-{os.getpid()}-{host}" for host in range(len(NAMES))]
        self._hub = f"dsx-{os.getpid()}-hub"

    def __enter__(self) -> SitesOfHosts:
        require_tools()
        for tool in ("sshd", "ssh", "ssh-keygen", "pdsh", "unshare"):
            if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
                raise TestbedUnavailable(f"no `{tool}`: install openssh-server, pdsh, util-linux")
        for name in ("id", "host"):
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)]
            subprocess.run(made, check=True)
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TestbedUnavailable):
            signal_all(processes_in(self._spaces), signal.SIGKILL)
        remove_namespaces([*self._spaces, self._hub])

    def on(self, host: int, *command: Any) -> list[Any]:
        """Return what runs a command on a host."""
        return [shutil.which("ip"), "netns", "exec", self._spaces[host], *command]

    def _build(self) -> None:
        for space in (self._hub, *self._spaces):
            run_ip("netns", "add", space)
            run_ip("-n", space, "link", "set", "lo", "up")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run_ip("netns", "exec", self._hub, "sh", "-c", forward)
        for first in (0, 2):
            one, other = self._spaces[first : first + 2]
            run_ip("link", "add", "lan", "netns", one, "type", "veth", "peer", "name", "lan",
                   "netns", other)  # fmt: skip
        for host, space in enumerate(self._spaces):
            run_ip("-n", space, "address", "add", f"{lan(host)}/24", "dev", "lan")
            run_ip("-n", space, "link", "set", "lan", "up")
            self._line(host, space)
            self._etc(host, HOSTS / space)
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in range(len(NAMES)):
            serve = f"hostname {NAMES[host]}; exec /usr/sbin/sshd -D -e"
            subprocess.Popen(
                self.on(host, "unshare", "--uts", "sh", "-c", serve),
                stderr=(self._folder / f"sshd_{host}.log").open("w"),
            )
        self._wait_for_ssh()

    def _line(self, host: int, space: str) -> None:
        near, far = f"203.0.113.{16 * host + 1}", f"host{host}"
        run_ip("link", "add", "wan", "netns", space, "type", "veth", "peer", "name", far,
               "netns", self._hub)  # fmt: skip
        run_ip("-n", self._hub, "address", "add", f"{near}/28", "dev", far)
        run_ip("-n", self._hub, "link", "set", far, "up")
        run_ip("-n", space, "address", "add", f"{wan(host)}/28", "dev", "wan")
        run_ip("-n", space, "link", "set", "wan", "up")
        run_ip("-n", space, "route", "replace", "default", "via", near)
        slow = f"tc qdisc add dev wan root tbf rate {self._mbit}mbit burst 256kb latency 50ms"
        run_ip("netns", "exec", space, *slow.split())

    def _etc(self, host: int, etc: Path) -> None:
        """Write what `ip netns exec` puts over /etc on a host."""
        (etc / "ssh").mkdir(parents=True, exist_ok=True)
        known = [
            f"{lan(other) if other // 2 == host // 2 else wan(other)} {name}"
            for other, name in enumerate(NAMES)
        ]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        for name in ("id", "id.pub", "host", "host.pub"):
            shutil.copy(self._folder / name, etc / "ssh" / name)
        (etc / "ssh" / "ssh_config").write_text(SSH_CONFIG)
        (etc / "ssh" / "sshd_config").write_text(SSHD_CONFIG)

    def _wait_for_ssh(self) -> None:
        until = time.monotonic() + 30
        for host in range(len(NAMES)):
            ask = self.on(host, "ssh", "-o", "BatchMode=yes", NAMES[host], "hostname")
            while subprocess.run(ask, capture_output=True, text=True).stdout.strip() != NAMES[host]:
                if time.monotonic() > until:
                    raise TestbedUnavailable(f"no ssh to {NAMES[host]} on {socket.gethostname()}")
                time.sleep(0.2)
