"""A line's latency: the forwarder by itself over socket pairs, and on a line of namespaces.

Where there is no root or no support, the tests that need a line are skipped with its reason.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from dsx.bench import latency, line
from dsx.bench.forwarder import Forwarder
from dsx.bench.latency import Latency
from dsx.bench.line import ProbeFailed, measure_round_trip
from dsx.bench.namespaces import TestbedUnavailable, processes_in
from dsx.bench.testbed import Line, Testbed
from dsx.cli import app

DSX = [sys.executable, "-c", "from dsx.cli import app; app()"]
EVERYBODY = b"\xff" * 6


def address(port: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, port])


def frame(target: bytes, source: int, text: bytes = b"") -> bytes:
    """What a packet socket gives: ten bytes for the checksum, two addresses, a type, the rest."""
    return bytes(10) + target + address(source) + b"\x08\x00" + text


@contextmanager
def forwarding(
    latency_seconds: float, num_ports: int = 3, queue_bytes: int = 10**6
) -> Generator[tuple[list[socket.socket], Forwarder], None, None]:
    """Forward between socket pairs on a thread; yield the outer ends."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(num_ports)]
    for inner, outer in pairs:
        inner.setblocking(False)
        outer.settimeout(10)
    forwarder = Forwarder(latency_seconds, [inner for inner, _ in pairs], queue_bytes)
    until, stop = os.pipe()
    thread = threading.Thread(target=forwarder.run, args=(until,))
    thread.start()
    try:
        yield [outer for _, outer in pairs], forwarder
    finally:
        os.close(stop)
        thread.join()
        os.close(until)
        for inner, outer in pairs:
            inner.close()
            outer.close()


def test_frames_leave_in_order_no_earlier_than_their_time() -> None:
    with forwarding(0.03) as (ports, forwarder):
        sent: list[float] = []
        for number in range(40):
            sent.append(time.monotonic())
            ports[0].send(frame(EVERYBODY, 0, bytes([number])))
            time.sleep(0.001)
        for number in range(40):
            got = ports[1].recv(1000)
            assert got == frame(EVERYBODY, 0, bytes([number]))
            assert time.monotonic() - sent[number] >= 0.03 - 1e-3  # the wall clock's grain
    assert forwarder.counts.frames == 80  # to both others
    assert forwarder.counts.dropped == 0


def test_what_is_for_one_goes_to_that_one_alone() -> None:
    with forwarding(0.0) as (ports, _):
        ports[1].send(frame(EVERYBODY, 1))
        ports[0].recv(1000), ports[2].recv(1000)
        ports[0].send(frame(address(1), 0, b"for 1"))
        ports[2].send(frame(address(0), 2, b"for 0"))
        assert ports[1].recv(1000) == frame(address(1), 0, b"for 1")
        assert ports[0].recv(1000) == frame(address(0), 2, b"for 0")
        ports[1].send(frame(EVERYBODY, 1, b"last"))
        assert ports[2].recv(1000) == frame(EVERYBODY, 1, b"last")  # and nothing before it


def test_the_queue_is_bounded_and_what_is_beyond_is_dropped_and_counted() -> None:
    with forwarding(0.2, num_ports=2, queue_bytes=10_000) as (ports, forwarder):
        big = frame(EVERYBODY, 0, bytes(1000 - 24))
        for _ in range(25):
            ports[0].send(big)
        for _ in range(10):
            assert len(ports[1].recv(2000)) == 1000
    assert forwarder.counts.dropped == 15
    assert forwarder.counts.most_bytes == 10_000


# What runs, the seconds that it is waited for, and what is said.
FORWARDERS = {
    "hangs": ("sleep 60", 0.1, "has not started within 0.1 s: exit status -9"),
    "half a word": ("printf rea; sleep 60", 0.1, "has not started within 0.1 s: exit status -9"),
    "closes its output": ("exec >&-; sleep 60", 1.0, "has not started: exit status -9"),
    "ends": ("echo 'no such port' >&2; exit 3", 20, "has not started: no such port"),
}


@pytest.mark.parametrize("script, seconds, said", FORWARDERS.values(), ids=FORWARDERS)
def test_a_forwarder_that_does_not_start_is_ended_and_told_of(
    script: str, seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = put_in_the_place_of_ip(script, tmp_path, monkeypatch)
    monkeypatch.setattr(latency, "_GRACE_SECONDS", seconds)
    with pytest.raises(TestbedUnavailable, match=said):
        Latency("hub", ["port0", "port1"], 0.01)
    assert [process.returncode is None for process in started] == [False]


def test_a_forwarder_that_hangs_at_its_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = put_in_the_place_of_ip("echo ready; sleep 60", tmp_path, monkeypatch)
    made = Latency("hub", ["port0", "port1"], 0.01)
    made.check()
    monkeypatch.setattr(latency, "_GRACE_SECONDS", 0.1)
    with pytest.raises(TestbedUnavailable, match="the forwarder has failed"):
        made.end()
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def put_in_the_place_of_ip(
    script: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> list[subprocess.Popen[str]]:
    """Return a list that what is started will be in."""
    command = directory / "ip"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    started: list[subprocess.Popen[str]] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started


class Echoless:
    """In a testbed's place: nobody answers in cluster 0, and cluster 1 runs `ping`."""

    def __init__(self, ping: str) -> None:
        self.commands = ["sleep 60", ping]
        self.started: list[subprocess.Popen[bytes]] = []

    def address(self, cluster: int) -> str:
        return f"10.77.0.{cluster + 1}"

    def start(self, cluster: int, command: Any, output: Any = None) -> subprocess.Popen[bytes]:
        words = ["sh", "-c", f"exec {self.commands[cluster]}"]
        self.started.append(
            subprocess.Popen(words, stdout=output, stderr=output and subprocess.STDOUT)
        )
        return self.started[-1]


@pytest.mark.parametrize(
    "ping, seconds, said",
    [
        ("ls /no-such-line", 20, "no byte has come back: .*No such file or directory"),
        ("sleep 60", 0.1, "11 bytes have not come back in 0.1 s"),
        ("true", 0.5, "11 bytes have not come back in 0.5 s"),  # and the echo does not end
    ],
)
def test_a_round_trip_that_fails_says_why_and_leaves_nothing(
    ping: str, seconds: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_PING_SECONDS", seconds)
    ends = Echoless(ping)
    with pytest.raises(ProbeFailed, match=said):
        measure_round_trip(cast(Testbed, ends))
    assert [process.returncode is None for process in ends.started] == [False, False]


@pytest.fixture(scope="module")
def bed() -> Generator[Testbed, None, None]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Testbed(2, Line(20, latency_milliseconds=15)))
        except TestbedUnavailable as error:
            pytest.skip(f"no testbed here: {error}")
        yield made


def hub(process: int) -> list[int]:
    return processes_in([f"dsx-{process}-hub"])


DATAGRAMS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    end.settimeout(10)
    if sys.argv[1] == "receive":
        end.bind(("10.77.0.1", 5007))
        print("bound", flush=True)
        print([int.from_bytes(end.recv(2000)[:4], "big") for _ in range(60)])
    else:
        for number in range(60):  # fewer bytes than the line's queue holds
            end.sendto(number.to_bytes(4, "big") + bytes(1000), ("10.77.0.1", 5007))
"""


def test_a_round_trip_takes_twice_the_latency_and_nothing_overtakes(bed: Testbed) -> None:
    assert 0.030 <= measure_round_trip(bed) < 0.045
    receiver = bed.start(0, [sys.executable, "-c", DATAGRAMS, "receive"], output=subprocess.PIPE)
    assert receiver.stdout is not None and receiver.stdout.readline() == b"bound\n"
    sender = bed.start(1, [sys.executable, "-c", DATAGRAMS, "send"])
    out, _ = receiver.communicate(timeout=20)
    assert sender.wait(10) == 0
    assert out.decode().strip() == str(list(range(60)))


def test_a_lifted_line_has_no_latency_and_gets_it_back(bed: Testbed) -> None:
    bed.throttle(None)
    assert measure_round_trip(bed) < 0.01
    assert bed.forwarded.frames > 0 and bed.forwarded.dropped == 0
    assert not hub(os.getpid())
    bed.throttle(Line(20, latency_milliseconds=15))
    assert 0.030 <= measure_round_trip(bed) < 0.045


def test_the_line_is_told_of_when_its_forwarder_has_ended(bed: Testbed) -> None:
    (process,) = hub(os.getpid())
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 10
    with pytest.raises(TestbedUnavailable, match="the forwarder has ended: exit status -9"):
        while time.monotonic() < deadline:
            bed.traffic(0)
    with pytest.raises(TestbedUnavailable, match="the forwarder has failed"):
        bed.throttle(None)
    bed.throttle(Line(20, latency_milliseconds=15))
    assert bed.traffic(0).bytes_sent > 0


def test_the_forwarder_ends_with_its_parent_whatever_ends_that(bed: Testbed) -> None:
    inside = "import time; print('inside', flush=True); time.sleep(60)"
    command = [*DSX, "bench", "line", "--latency-ms", "5", "--", sys.executable, "-c", inside]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert "inside" in parent.stdout.readline()
    assert len(hub(parent.pid)) == 1
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 10
    while hub(parent.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not hub(parent.pid)
    subprocess.run([*DSX, "bench", "line", "--", "true"], check=True, capture_output=True)


@pytest.mark.ci
def test_the_rate_is_the_lines_where_the_window_is_large(bed: Testbed) -> None:
    """The bare line, 40 Mbit/s and 20 ms: 200 kB are on their way; slow start is in the figure."""
    done = subprocess.run(
        [*DSX, "bench", "line", "--mbit", "40", "--latency-ms", "20", "--json", "/dev/stdout"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (result,) = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert 0.7 * 40e6 < 8 * result["bytes_sent"] / result["seconds"] < 1.05 * 40e6
    assert 40 <= result["round_trip_milliseconds"] < 60


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--latency-ms", "-1"], "latency_milliseconds=-1 must be"),
        (["--latency-ms", "5", "--mbit", "200"], "megabits_per_second=200 with a latency must be"),
    ],
)
def test_what_a_line_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "line", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
