"""The slow line of namespaces: its rate, the kernel's counts, and that nothing is left behind.

Where there is no root or no support, the tests that need a line are skipped with its reason.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dsx.bench.namespaces import TestbedUnavailable, remove_left_behind
from dsx.bench.testbed import (
    UNAVAILABLE,
    Line,
    Testbed,
    read_traffic,
)
from dsx.cli import app

DSX = [sys.executable, "-c", "from dsx.cli import app; app()"]
NAMESPACES = Path("/run/netns")


@pytest.fixture(scope="module")
def bed() -> Generator[Testbed, None, None]:
    try:
        with Testbed(2, Line(40)) as made:
            yield made
    except TestbedUnavailable as error:
        pytest.skip(f"no testbed here: {error}")


def ours(process: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"dsx-{process}-*")]


def test_what_has_a_core_is_ahead_of_other_sessions(bed: Testbed) -> None:
    group = Path("/proc/self/autogroup")
    if not group.exists():
        pytest.skip("this kernel does not share cores by session")
    nicenesses: list[str] = []
    for core in (None, min(os.sched_getaffinity(0))):
        with bed.start(0, ["sleep", "60"], core=core) as process:
            nicenesses.append(Path(f"/proc/{process.pid}/autogroup").read_text().split()[-1])
            process.kill()
    assert nicenesses == ["0", "-10"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EROFS])
def test_what_cannot_be_put_ahead_runs_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(
        "dsx.bench.testbed.subprocess.Popen", lambda *_, **__: SimpleNamespace(pid=1)
    )
    closed = Testbed(2, None)
    for core in (None, 0, 1):
        assert closed.start(0, ["true"], core=core).pid == 1
    (told,) = caplog.messages
    assert "cannot be put ahead" in told and os.strerror(number) in told


SEND = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server(("10.77.0.1", 5005)) as server:
        server.settimeout(20)
        connection, _ = server.accept()
        began, count = time.monotonic(), 0
        while data := connection.recv(1 << 16):
            count += len(data)
    print(count, time.monotonic() - began)
else:
    for _ in range(200):
        try:
            connection = socket.create_connection(("10.77.0.1", 5005))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes(2_500_000))
    connection.close()
"""


def test_a_line_carries_its_rate_and_the_kernel_counts_every_frame(bed: Testbed) -> None:
    before = bed.traffic(1)
    receiver = bed.start(0, [sys.executable, "-c", SEND, "receive"], output=subprocess.PIPE)
    sender = bed.start(1, [sys.executable, "-c", SEND, "send"])
    out, _ = receiver.communicate(timeout=30)
    assert sender.wait(10) == 0
    count, seconds = out.split()
    passed = bed.traffic(1) - before
    assert int(count) == 2_500_000
    # 1448 of 1514 bytes are payload, and as good as nothing was sent twice
    assert 1.045 < passed.bytes_sent / 2_500_000 < 1.06
    rate = 8 * passed.bytes_sent / float(seconds)
    assert 0.3 * 40e6 < rate < 40e6 * 1.05  # with what the bucket holds, and on a busy machine
    assert passed.packets_sent > 2_500_000 / 1448


def test_an_own_interface_and_a_name_for_it_in_every_cluster(bed: Testbed) -> None:
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    process = bed.start(1, [sys.executable, "-c", ask], output=subprocess.PIPE)
    out, _ = process.communicate(timeout=20)
    assert out.decode().strip() == bed.address(1) == "10.77.0.2"


def test_counters_of_a_host_without_the_interface_are_refused() -> None:
    with pytest.raises(ValueError, match="has no dsx0"):
        read_traffic("Inter-| Receive\n    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--clusters", "5"], "clusters=5 must be 2 to 4"),
        (["--mbit", "0"], "megabits_per_second=0 must be"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "line", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


def test_without_tools_it_says_so_and_exits_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "line"], env={"PATH": str(tmp_path)})
    assert done.exit_code == UNAVAILABLE
    assert "no `ip` on this host: install iproute2" in done.stderr


def test_what_a_command_calls_an_option_is_its_own() -> None:
    done = CliRunner().invoke(app, ["bench", "line", "--mbits", "5", "--", "true"])
    assert done.exit_code == 2
    assert "No such option: --mbits" in done.stderr


def test_leftovers_of_a_dead_process_are_found_under_etc_too(bed: Testbed) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    left = Path(f"/etc/netns/dsx-{gone.pid}-0")
    left.mkdir(parents=True)
    assert left.name in remove_left_behind()
    assert not left.exists()


def test_a_burst_is_small_against_a_transfer_unless_given() -> None:
    assert Line(20).burst_bytes == 25_000 and Line(0.5).burst_bytes == 4096
    assert Line(0.5, burst_kilobytes=64).burst_bytes == 65536
    assert Line(0.5).queue_bytes >= 65536  # or a slow line would drop what a window holds


def test_a_failing_command_gives_its_status_and_ends_the_others(bed: Testbed) -> None:
    script = "import sys, time; sys.exit(3) if sys.argv[1] == '1' else time.sleep(60)"
    done = subprocess.run(
        [*DSX, "bench", "line", "--", sys.executable, "-c", script, "{cluster}"],
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 3, done.stderr
    assert "SIGTERM" in done.stdout  # of the other one


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_whatever_ends_it(bed: Testbed, number: signal.Signals) -> None:
    inside = "import time; print('inside', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [*DSX, "bench", "line", "--", sys.executable, "-c", inside],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert "inside" in process.stdout.readline()
    assert len(ours(process.pid)) == 3
    process.send_signal(number)
    process.wait(40)
    if number == signal.SIGKILL:  # the next testbed finds what it could not remove
        assert ours(process.pid)
        subprocess.run([*DSX, "bench", "line", "--", "true"], check=True, capture_output=True)
    assert not ours(process.pid)
    assert not list(Path("/etc/netns").glob(f"dsx-{process.pid}-*"))
    assert bed.traffic(0).bytes_sent >= 0  # the testbed of another process still stands
