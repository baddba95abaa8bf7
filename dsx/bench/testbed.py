"""A slow line on one host: a network namespace per cluster, throttled veth pairs between them.

Every cluster has an interface `dsx0` with an address of its own; a bridge in one more namespace
joins them, so nothing shows in the host's own network. `tc tbf` shapes both ends of every pair:
what a cluster sends and what it receives, each at the line's rate (full duplex). Bytes are the
kernel's own counts per interface, Ethernet headers included. Segments leave one by one
(`gso_max_segs 1`), so that the counters see the headers that a real line carries. A line with a
latency has a forwarder in the bridge's place (forwarder.py): not every kernel has netem.

It needs Linux, root, and `ip` and `tc`; `TestbedUnavailable` says what is missing. Everything is
removed when the context ends, by an exception, Ctrl-C or SIGTERM, too; what a SIGKILL left behind
is removed by the next testbed.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from dsx.bench.forwarder import Counts
from dsx.bench.latency import Latency
from dsx.bench.namespaces import (
    HOSTS,
    TestbedUnavailable,
    processes_in,
    remove_left_behind,
    remove_namespaces,
    require_tools,
    run_ip,
    signal_all,
)
from dsx.plan.published.scenario import require_number

logger = logging.getLogger(__name__)

INTERFACE = "dsx0"
UNAVAILABLE = 77  # exit code where there is no testbed; what test harnesses call skipped
MAX_CLUSTERS = 4
_GRACE_SECONDS = 10.0
_NICENESS = -10  # of what has a core
_MOST_DELAYED_MEGABITS = 100.0  # the forwarder hands on frame by frame, on one core


def ending(error: BaseException) -> tuple[str, int]:
    """Return what a command says of what has ended it, and its exit status."""
    if isinstance(error, TestbedUnavailable):
        return f"no testbed: {error}", UNAVAILABLE
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the testbed has been removed", 130
    return str(error), 2 if isinstance(error, (ValueError, FileNotFoundError)) else 1


@dataclass(frozen=True)
class Line:
    """One cluster's line, each way: `megabits_per_second` counts Ethernet frames, as `tc` does.

    `burst_kilobytes` may pass at once after a pause: without a number 10 ms of the rate, so that
    it is small against any transfer. `queue_milliseconds` of the rate, but at least 64 KiB, wait in
    the queue before packets are dropped. `latency_milliseconds` one way: a round trip takes two.
    """

    megabits_per_second: float
    burst_kilobytes: int | None = None
    queue_milliseconds: float = 50.0
    latency_milliseconds: float = 0.0

    def __post_init__(self) -> None:
        require_number("megabits_per_second", self.megabits_per_second, 0.01, 100_000)
        if self.burst_kilobytes is not None:
            require_number("burst_kilobytes", self.burst_kilobytes, 2, 100_000)
        require_number("queue_milliseconds", self.queue_milliseconds, 1, 10_000)
        require_number("latency_milliseconds", self.latency_milliseconds, 0, 2000)
        if self.latency_milliseconds and self.megabits_per_second > _MOST_DELAYED_MEGABITS:
            raise ValueError(
                f"megabits_per_second={self.megabits_per_second:g} with a latency must be at most "
                f"{_MOST_DELAYED_MEGABITS:g}, which is what the forwarder carries; take a slower "
                "line, or leave the latency out"
            )

    @property
    def burst_bytes(self) -> int:
        """At least two frames, which `tc` cannot do without."""
        if self.burst_kilobytes is not None:
            return 1024 * self.burst_kilobytes
        return max(round(self.megabits_per_second * 1e6 / 8 * 0.01), 4096)

    @property
    def queue_bytes(self) -> int:
        """What waits, or is in the bucket."""
        waiting = self.megabits_per_second * 1e6 / 8 * self.queue_milliseconds / 1000
        return max(round(waiting), 65536) + self.burst_bytes


@dataclass(frozen=True)
class Traffic:
    """What has passed a cluster's interface, by the kernel's count."""

    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent - before.bytes_sent,
            self.bytes_received - before.bytes_received,
            self.packets_sent - before.packets_sent,
            self.packets_received - before.packets_received,
        )


class Testbed:
    """`num_clusters` namespaces on throttled lines, while the context is open; one per process."""

    __test__ = False

    def __init__(self, num_clusters: int, line: Line | None) -> None:
        if not 2 <= num_clusters <= MAX_CLUSTERS:
            raise ValueError(f"clusters={num_clusters} must be 2 to {MAX_CLUSTERS} on a testbed")
        self.num_clusters = num_clusters
        self._line = line
        self._hub = f"dsx-{os.getpid()}-hub"
        self._started: list[subprocess.Popen[bytes]] = []
        self._latency: Latency | None = None
        self.forwarded = Counts()  # by the forwarder that has ended last
        self._handlers: dict[int, object] = {}
        self._is_told = False  # that nothing can be put ahead

    def __enter__(self) -> Testbed:
        require_tools()
        remove_left_behind()
        self._clear()  # of an earlier process that had our number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _leave)
        try:
            self._build()
            self.throttle(self._line)
        except OSError as error:
            self._remove()
            raise TestbedUnavailable(str(error)) from error
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def namespace(self, cluster: int) -> str:
        """Return the name that `ip netns` knows a cluster by."""
        return f"dsx-{os.getpid()}-{cluster}"

    def address(self, cluster: int) -> str:
        """Return a cluster's address on the line."""
        return f"10.77.0.{cluster + 1}"

    def throttle(self, line: Line | None) -> None:
        """Give both ends of every cluster's line another rate, at once; None lifts it.

        Another latency breaks what is on its way: TCP sends it again. Errors as of `check`.
        """
        self._delay(line.latency_milliseconds / 1000 if line is not None else 0.0)
        for cluster in range(self.num_clusters):
            ends = ((self.namespace(cluster), INTERFACE), (self._hub, f"port{cluster}"))
            for namespace, interface in ends:
                where = ("netns", "exec", namespace, "tc", "qdisc")
                if line is None:
                    run_ip(*where, "replace", "dev", interface, "root", "pfifo")
                    continue
                run_ip(
                    *where, "replace", "dev", interface, "root", "tbf",
                    "rate", f"{round(line.megabits_per_second * 1e6)}bit",
                    "burst", f"{line.burst_bytes}b", "limit", f"{line.queue_bytes}b",
                )  # fmt: skip

    def check(self) -> None:
        """Raise TestbedUnavailable if a line with a latency is gone."""
        if self._latency is not None:
            self._latency.check()

    def traffic(self, cluster: int) -> Traffic:
        """Return what has passed a cluster's interface since the testbed was made."""
        self.check()
        return read_traffic(
            run_ip("netns", "exec", self.namespace(cluster), "cat", "/proc/net/dev")
        )

    def start(
        self,
        cluster: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | int | None = None,
        core: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command inside a cluster; it ends with the testbed.

        With a core it runs there alone, ahead of whatever else the host does on it.
        """
        pinned = [] if core is None else ["nice", "-n", f"{_NICENESS}", "taskset", "-c", str(core)]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(cluster), *pinned, *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )
        self._started.append(process)
        if core is not None and (refused := _put_ahead(process.pid)) and not self._is_told:
            self._is_told = True
            logger.warning(
                "what runs on the testbed cannot be put ahead of other work (%s): keep this "
                "machine quiet, or give it CAP_SYS_NICE and a writable /proc", refused
            )  # fmt: skip
        return process

    def end_processes(self) -> None:
        """End whatever still runs inside the clusters: SIGTERM, and after some seconds SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _GRACE_SECONDS
            signal_all(self._running(), number)
            while self._running() and time.monotonic() < until:
                time.sleep(0.1)
        self._started.clear()

    def _delay(self, seconds: float) -> None:
        """Put a forwarder in the bridge's place, or the bridge back where there is no latency."""
        if seconds == (0.0 if self._latency is None else self._latency.seconds):
            return
        ports = [f"port{cluster}" for cluster in range(self.num_clusters)]
        self._end_latency()
        for port in ports:
            where = ("nomaster",) if seconds else ("master", "bridge")
            run_ip("-n", self._hub, "link", "set", port, *where)
        if seconds:
            self._latency = Latency(self._hub, ports, seconds)

    def _end_latency(self) -> None:
        latency, self._latency = self._latency, None
        if latency is not None:
            self.forwarded = latency.end()

    def _running(self) -> list[int]:
        """Return what is inside the clusters, and what was started but is not inside yet."""
        started = [process.pid for process in self._started if process.poll() is None]
        inside = processes_in([self.namespace(m) for m in range(self.num_clusters)])
        return sorted({*started, *inside})

    def _build(self) -> None:
        run_ip("netns", "add", self._hub)
        run_ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", self._hub, "link", "set", "bridge", "up")
        for cluster in range(self.num_clusters):
            name, port = self.namespace(cluster), f"port{cluster}"
            HOSTS.joinpath(name).mkdir(parents=True, exist_ok=True)
            HOSTS.joinpath(name, "hosts").write_text(self._hosts(cluster))
            run_ip("netns", "add", name)
            run_ip("link", "add", INTERFACE, "netns", name, "type", "veth",
                "peer", "name", port, "netns", self._hub)  # fmt: skip
            for namespace, interface in ((name, INTERFACE), (self._hub, port)):
                run_ip(
                    "-n", namespace, "link", "set", interface, "mtu", "1500", "gso_max_segs", "1"
                )
            run_ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            run_ip("-n", name, "addr", "add", f"{self.address(cluster)}/24", "dev", INTERFACE)
            run_ip("-n", name, "link", "set", "lo", "up")
            run_ip("-n", name, "link", "set", INTERFACE, "up")
            # the kernel's own default; a host may prefer another, and figures would differ by it
            run_ip("-n", name, "route", "replace", "10.77.0.0/24", "dev", INTERFACE,
                "src", self.address(cluster), "congctl", "cubic")  # fmt: skip

    def _clear(self) -> None:
        remove_namespaces([self._hub, *map(self.namespace, range(MAX_CLUSTERS))])

    def _hosts(self, own: int) -> str:
        """Return /etc/hosts of a cluster: the host's own name leads to its end of the line.

        So whoever asks for the host's address to listen on gets one that others can reach.
        """
        addresses = {m: self.address(m) for m in range(self.num_clusters)}
        names = {m: f"cluster-{m}" for m in addresses}
        names[own] = f"{os.uname().nodename} {names[own]}"
        lines = [f"{addresses[m]} {names[m]}\n" for m in addresses]
        return "".join(["127.0.0.1 localhost\n", *lines])

    def _remove(self) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        try:
            try:
                self.end_processes()
                self._end_latency()
            finally:
                self._clear()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]


def read_traffic(counters: str) -> Traffic:
    """Read the text of /proc/net/dev as it is inside a cluster."""
    for line in counters.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = [int(field) for field in numbers.split()]
            return Traffic(fields[8], fields[0], fields[9], fields[1])
    raise ValueError(f"/proc/net/dev has no {INTERFACE}: {counters!r}")


def _put_ahead(session: int) -> OSError | None:
    """Give a session its niceness against others, where the kernel shares cores by session.

    Return why that is refused, if it is.
    """
    try:
        Path(f"/proc/{session}/autogroup").write_text(f"{_NICENESS}")
    except (FileNotFoundError, ProcessLookupError):  # it does not, or all has ended
        return None
    except OSError as error:
        return error
    return None


def _leave(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
