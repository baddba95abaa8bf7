"""Network namespaces of this host, by `ip`: run it, find what is inside, remove them.

Those of a testbed are named after its process: `dsx-PID-hub`, `dsx-PID-0`, `dsx-PID-1`, ...
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

NAMESPACES = Path("/run/netns")
HOSTS = Path("/etc/netns")  # `ip netns exec` puts what is in here over /etc
_OWNED = re.compile(r"dsx-(\d+)-(hub|\d)")


class TestbedUnavailable(RuntimeError):
    """This host cannot make a slow line: not root, no tool, or no support in the kernel."""

    __test__ = False


def remove_left_behind() -> list[str]:
    """Remove the namespaces of testbeds whose process is gone; return their names."""
    found = sorted({path.name for where in (NAMESPACES, HOSTS) for path in where.glob("dsx-*")})
    owners = {name: int(match[1]) for name in found if (match := _OWNED.fullmatch(name))}
    gone = [name for name, owner in owners.items() if not Path(f"/proc/{owner}").exists()]
    signal_all(processes_in(gone), signal.SIGKILL)
    remove_namespaces(gone)
    return gone


def remove_namespaces(names: Sequence[str]) -> None:
    """Remove namespaces with all that is in them, as far as they exist."""
    failed: list[TestbedUnavailable] = []
    for name in names:
        shutil.rmtree(HOSTS / name, ignore_errors=True)
        try:
            if (NAMESPACES / name).exists():
                run_ip("netns", "del", name)
        except TestbedUnavailable as error:
            failed.append(error)  # the others are removed all the same
    if failed:
        raise failed[0]


def processes_in(namespaces: Sequence[str]) -> list[int]:
    """Return the numbers of the processes inside, as far as the namespaces exist."""
    existing = [name for name in namespaces if (NAMESPACES / name).exists()]
    return [int(pid) for name in existing for pid in run_ip("netns", "pids", name).split()]


def signal_all(processes: Sequence[int], number: int) -> None:
    """Send a signal to all that are still there."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue  # it has just ended by itself


def require_tools() -> None:
    """Raise TestbedUnavailable unless `ip`, `tc` and root are to be had."""
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            raise TestbedUnavailable(f"no `{tool}` on this host: install {package}")
    if os.geteuid() != 0:
        raise TestbedUnavailable(
            "network namespaces and `tc` need root; run it as root, or in a container with "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )


def run_ip(*arguments: str) -> str:
    """Run `ip`; the kernel's refusal becomes `TestbedUnavailable`."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise TestbedUnavailable(
            f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
