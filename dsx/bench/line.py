"""`dsx bench line`: run a command in every cluster of a testbed, or measure the bare line.

The command's words may contain `{cluster}`, `{clusters}`, `{address}` (the cluster's own),
`{rendezvous}` (tcp://, in cluster 0) and `{interface}`. Output is prefixed with the cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.table import Table

from dsx.bench.forwarder import Counts
from dsx.bench.testbed import INTERFACE, Line, Testbed, Traffic

_PORT = 29400
_PROBE_SECONDS = 3.0
_POLL_SECONDS = 0.1
_PINGS, _PING_SECONDS = 11, 60.0
# One connection to cluster 0 and bytes into it for some seconds, from the standard library alone.
_CONNECT = """
import socket, sys, time
until = time.monotonic() + 10
while True:
    try:
        connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        break
    except ConnectionRefusedError:
        if time.monotonic() > until:
            raise
        time.sleep(0.05)
"""
_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
"""
_SEND = f"""{_CONNECT}
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
"""
# So many bytes there and back, one by one; the median is printed.
_ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    connection, _ = server.accept()
    while byte := connection.recv(1):
        connection.sendall(byte)
"""
_PING = f"""{_CONNECT}
seconds = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    connection.sendall(b".")
    connection.recv(1)
    seconds.append(time.perf_counter() - began)
print(sorted(seconds)[len(seconds) // 2])
"""


@dataclass(frozen=True)
class ClusterResult:
    """What one cluster's command did: its exit status, and the kernel's counts meanwhile.

    `round_trip_milliseconds`: of the bare line, else None.
    """

    cluster: int
    status: int
    seconds: float
    bytes_sent: int
    bytes_received: int
    round_trip_milliseconds: float | None = None


class ProbeFailed(RuntimeError):
    """The bare line has not carried what was sent."""


def cores_for(num_clusters: int) -> list[int]:
    """Return a core per cluster, of those that this process may use; ValueError if too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_clusters:
        raise ValueError(
            f"clusters={num_clusters} need a core each; this process may use {len(cores)}"
        )
    return cores


def shared_cores(num_clusters: int) -> list[int]:
    """Return a core per cluster, several clusters on one where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[cluster % len(cores)] for cluster in range(num_clusters)]


def run_in_clusters(
    bed: Testbed, command: Sequence[str], cores: Sequence[int] | None
) -> list[ClusterResult]:
    """Run a command in every cluster to its end; where one fails, the others are ended."""
    clusters = range(bed.num_clusters)
    before = [bed.traffic(m) for m in clusters]
    began = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    echoes: list[threading.Thread] = []
    for cluster in clusters:
        words = [_filled(word, bed, cluster) for word in command]
        core = None if cores is None else cores[cluster]
        process = bed.start(cluster, words, output=subprocess.PIPE, core=core)
        assert process.stdout is not None
        echo = threading.Thread(target=_echo, args=(process.stdout, f"[cluster {cluster}] "))
        echo.start()
        processes.append(process)
        echoes.append(echo)
    ended: dict[int, tuple[float, Traffic]] = {}
    while len(ended) < len(processes):
        bed.check()
        for cluster, process in enumerate(processes):
            if cluster not in ended and process.poll() is not None:
                ended[cluster] = (time.monotonic() - began, bed.traffic(cluster))
        if any(p.poll() not in (None, 0) for p in processes):
            bed.end_processes()
        time.sleep(_POLL_SECONDS)
    for echo in echoes:
        echo.join()
    return [
        ClusterResult(
            cluster,
            processes[cluster].returncode,
            seconds,
            (traffic - before[cluster]).bytes_sent,
            (traffic - before[cluster]).bytes_received,
        )
        for cluster, (seconds, traffic) in sorted(ended.items())
    ]


def probe(bed: Testbed, line: Line) -> ClusterResult:
    """Send for some seconds from cluster 1 to cluster 0 over one connection."""
    round_trip = measure_round_trip(bed)
    where = [bed.address(0), str(_PORT)]
    payload = round(line.megabits_per_second * 1e6 / 8 * _PROBE_SECONDS)
    before, began = bed.traffic(1), time.monotonic()
    receiver = bed.start(0, [sys.executable, "-c", _RECEIVE, *where])
    sender = bed.start(1, [sys.executable, "-c", _SEND, *where, str(payload)])
    deadline = 60 + 10 * _PROBE_SECONDS
    try:
        status = sender.wait(deadline) or receiver.wait(deadline)
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(
            f"{payload} bytes have not arrived within {deadline:g} s on a line of "
            f"{line.megabits_per_second:g} Mbit/s"
        ) from error
    passed = bed.traffic(1) - before
    seconds = time.monotonic() - began
    return ClusterResult(
        1, status, seconds, passed.bytes_sent, passed.bytes_received, 1000 * round_trip
    )


def measure_round_trip(bed: Testbed) -> float:
    """Return the seconds that one byte takes from cluster 1 to cluster 0 and back, the median.

    ProbeFailed, with what the sending side has written, if none comes back.
    """
    where = [bed.address(0), str(_PORT + 1)]
    ping_command = [sys.executable, "-c", _PING, *where, str(_PINGS)]
    with (
        bed.start(0, [sys.executable, "-c", _ECHO, *where]) as echo,
        bed.start(1, ping_command, output=subprocess.PIPE) as ping,
    ):
        try:
            out, _ = ping.communicate(timeout=_PING_SECONDS)
            if ping.returncode:  # then the echo may wait for ever
                raise ProbeFailed(f"no byte has come back: {out.decode(errors='replace').strip()}")
            echo.wait(_PING_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ProbeFailed(
                f"{_PINGS} bytes have not come back in {_PING_SECONDS:g} s"
            ) from error
        finally:
            ping.kill()
            echo.kill()
    return float(out)


def show_results(results: Sequence[ClusterResult], console: Console) -> None:
    """Print a row per cluster."""
    table = Table(caption=f"bytes on {INTERFACE} by the kernel, Ethernet headers included")
    table.add_column("cluster")
    for name in ("exit", "seconds", "sent MB", "received MB", "sent Mbit/s"):
        table.add_column(name, justify="right")
    is_probed = any(result.round_trip_milliseconds is not None for result in results)
    if is_probed:
        table.add_column("round trip ms", justify="right")
    for result in results:
        status = result.status
        table.add_row(
            str(result.cluster),
            str(status) if status >= 0 else signal.Signals(-status).name,
            f"{result.seconds:.1f}",
            f"{result.bytes_sent / 1e6:.3f}",
            f"{result.bytes_received / 1e6:.3f}",
            f"{8e-6 * result.bytes_sent / result.seconds:.3g}",
            *([f"{result.round_trip_milliseconds:.3g}"] if is_probed else []),
        )
    console.print(table)


def say_forwarded(counts: Counts) -> str:
    """Say in a line what the latency's forwarder has done."""
    return (
        f"delayed {counts.frames:,} frames, dropped {counts.dropped:,}; at most "
        f"{counts.most_bytes / 1e3:,.0f} kB were on their way, and one came "
        f"{1000 * counts.latest_seconds:.1f} ms late"
    )


def _filled(word: str, bed: Testbed, cluster: int) -> str:
    values = {
        "cluster": str(cluster),
        "clusters": str(bed.num_clusters),
        "address": bed.address(cluster),
        "rendezvous": f"tcp://{bed.address(0)}:{_PORT}",
        "interface": INTERFACE,
    }
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def _echo(stream: IO[bytes], prefix: str) -> None:
    with stream:
        for text in iter(stream.readline, b""):
            sys.stdout.write(prefix + text.decode(errors="replace"))
            sys.stdout.flush()
