"""The one port of a host: who is handed to which rank, and what nobody gets through it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator

import pytest
import zmq

from dsx.comm.links.entrance import Limits
from dsx.comm.links.gateway_process import GatewayLost, GatewayProcess
from dsx.comm.links.greetings import rank_name, routing_id
from tests.comm.links.callers import Called, Calling, ask, eventually, exactly, socks
from tests.levels import by_default

ZERO, THREE = rank_name("site-a", 0), rank_name("site-a", 3)
LIMITS = Limits(most_connections=64, most_greeting=300, greeting_seconds=1.0)
SO_RCVBUFFORCE = 33  # of Linux, for root: above the system's limit


@pytest.fixture
def gateway() -> Generator[GatewayProcess, None, None]:
    process = GatewayProcess("127.0.0.1", 0, LIMITS)
    process.port = process.start()  # type: ignore[attr-defined]
    yield process
    process.stop()


def port_of(gateway: GatewayProcess) -> int:
    return gateway.port  # type: ignore[attr-defined]


def refused(gateway: GatewayProcess) -> dict[str, int]:
    return gateway.counts()["refused"]


def test_each_caller_reaches_the_rank_of_its_slot_and_large_messages_come_whole(
    gateway: GatewayProcess,
) -> None:
    with Called() as zero, Called() as three:
        gateway.update({ZERO: (0, "127.0.0.1", zero.port), THREE: (7, "127.0.0.1", three.port)})
        port = port_of(gateway)
        with Calling(zero, port, routing_id(0)) as a, Calling(three, port, routing_id(7)) as b:
            assert a.echoes() and b.echoes()
            assert a.echoes(20_000_000) and b.echoes(1)
            assert eventually(lambda: gateway.counts()["bytes_out"] > 20_000_000)
        assert eventually(lambda: gateway.counts()["joined"] == 0)
        # a rank's own key is not another's: whoever is handed on wrongly gets nowhere
        with Calling(zero, port, routing_id(7)) as wrong:
            assert not wrong.echoes(milliseconds=500)


@pytest.mark.parametrize("slot", [0, 1, 100, 238])
def test_libzmq_tells_the_slot_before_all_that_is_encrypted(slot: int) -> None:
    """The gateway rests on it: the length of the routing id, plus 1, in ZMTP's signature."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = context.socket(zmq.DEALER)
        caller.routing_id = routing_id(slot)
        caller.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        listener.settimeout(10)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            signature = exactly(connection, 10)
        context.destroy(0)
    assert signature == b"\xff" + (16 + slot + 1).to_bytes(8, "big") + b"\x7f"


@pytest.mark.ci
def test_a_cut_connection_is_opened_again_through_the_gateway(gateway: GatewayProcess) -> None:
    with Called() as zero:
        gateway.update({ZERO: (0, "127.0.0.1", zero.port)})
        with Calling(zero, port_of(gateway), routing_id(0)) as caller:
            assert caller.echoes()
            for _ in range(3):
                assert gateway.counts()["joined"] == 1
                reset_all_to(port_of(gateway))
                assert caller.waits_for(zmq.EVENT_DISCONNECTED)
                assert caller.waits_for(zmq.EVENT_HANDSHAKE_SUCCEEDED)  # what goes before is lost
                assert caller.echoes()


def reset_all_to(port: int) -> None:
    """Shut down this process's connections to a port, as a cut line does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                        copy.shutdown(socket.SHUT_RDWR)


def test_only_what_is_in_the_table_is_connected_to(gateway: GatewayProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.5)
        gateway.update({ZERO: (0, "127.0.0.1", 1)})
        port = port_of(gateway)
        number = other.getsockname()[1].to_bytes(2, "big")
        name = b"localhost"
        for request, code in (
            (b"\5\1\0\1\x7f\0\0\1" + number, 8),  # an address
            (b"\5\1\0\4" + bytes(15) + b"\1" + number, 8),
            (b"\5\1\0\3" + bytes((len(name),)) + name + number, 2),  # a name of none
            (b"\5\2\0\3\1a\0\1", 7),  # BIND
            (b"\5\3\0\3\1a\0\1", 7),  # UDP
            (socks(THREE)[1], 2),
            (socks(ZERO)[1], 5),  # it is in the table, and nobody listens
        ):
            heard = ask(port, b"\5\1\0", request)
            assert heard[:4] == b"\5\0\5" + bytes((code,)), request
        assert ask(port, b"\5\1\2") == b"\5\xff"  # with a password alone
        assert ask(port, b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n") == b""
        assert ask(port, b"\4\1\0\x16\x7f\0\0\1\0") == b""  # SOCKS4
        with pytest.raises(TimeoutError):
            other.accept()
        assert sum(refused(gateway).values()) == 10
        assert refused(gateway)["SOCKS5 for an address"] == 2


def test_a_name_reaches_its_rank_and_the_end_of_one_direction_is_passed_on(
    gateway: GatewayProcess,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank:
        gateway.update({THREE: (0, "127.0.0.1", rank.getsockname()[1])})
        rank.settimeout(10)
        with socket.create_connection(("127.0.0.1", port_of(gateway)), timeout=10) as caller:
            for piece in socks(THREE):
                caller.sendall(piece)
            inside, _ = rank.accept()
            with inside:
                inside.settimeout(10)
                assert exactly(caller, 12) == b"\5\0" + b"\5\0\0\1" + bytes(6)
                caller.sendall(b"question")
                caller.shutdown(socket.SHUT_WR)
                assert exactly(inside, 8) == b"question"
                assert inside.recv(1) == b""  # its end, while the answer can still come
                inside.sendall(b"answer" * 1000)
                assert exactly(caller, 6000) == b"answer" * 1000
            assert caller.recv(1) == b""
        assert eventually(lambda: gateway.counts()["joined"] == 0)


@pytest.mark.ci
def test_a_rank_that_does_not_read_holds_up_nobody_else(gateway: GatewayProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank, Called() as other:
        gateway.update(
            {ZERO: (0, "127.0.0.1", other.port), THREE: (3, "127.0.0.1", rank.getsockname()[1])}
        )
        with socket.create_connection(("127.0.0.1", port_of(gateway)), timeout=1) as caller:
            for piece in socks(THREE):
                caller.sendall(piece)
            with pytest.raises(TimeoutError):
                while True:
                    caller.sendall(bytes(1 << 20))
            with Calling(other, port_of(gateway), routing_id(0)) as fine:
                assert fine.echoes(5_000_000)
        assert eventually(lambda: gateway.counts()["joined"] == 0)


@pytest.mark.ci
def test_500_silent_connections_neither_stop_nor_slow_others(gateway: GatewayProcess) -> None:
    with Called() as zero:
        gateway.update({ZERO: (0, "127.0.0.1", zero.port)})
        port = port_of(gateway)
        with Calling(zero, port, routing_id(0)) as before:
            assert before.echoes()
            silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(500)]
            began = time.monotonic()
            with Calling(zero, port, routing_id(0)) as during:
                assert during.echoes()
                assert time.monotonic() - began < 2
            assert before.echoes(1_000_000)
            assert eventually(lambda: gateway.counts()["greeting"] == 0)  # by the deadline
            told = refused(gateway)
            assert told["too many that say nothing: the oldest"] >= 200
            assert told["not joined in time"] >= 200
            assert before.echoes()
            for connection in silent:
                connection.close()


@pytest.mark.ci
def test_no_more_are_joined_than_is_allowed(gateway: GatewayProcess) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as rank:
        gateway.update({ZERO: (0, "127.0.0.1", rank.getsockname()[1])})
        callers = [socket.create_connection(("127.0.0.1", port_of(gateway))) for _ in range(80)]
        for caller in callers:
            caller.settimeout(10)
            for piece in socks(ZERO):
                caller.sendall(piece)
        codes = [exactly(caller, 12)[3] for caller in callers]
        assert sorted(codes) == [0] * 64 + [1] * 16
        assert refused(gateway)["too many connections"] == 16
    for caller in callers:
        caller.close()
    assert eventually(lambda: gateway.counts()["joined"] == 0)


@pytest.mark.ci
def test_a_stranger_is_handed_on_and_gets_nothing_from_the_rank(gateway: GatewayProcess) -> None:
    with Called() as zero:
        gateway.update({ZERO: (0, "127.0.0.1", zero.port)})
        with Calling(zero, port_of(gateway), routing_id(0), is_known=False) as stranger:
            assert stranger.waits_for(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            assert not stranger.echoes(milliseconds=300)


def test_it_ends_with_the_process_that_started_it_however_that_ends() -> None:
    start = (
        "import os, sys, time\n"
        "from dsx.comm.links.gateway_process import GatewayProcess\n"
        "g = GatewayProcess('127.0.0.1', 0); g.start()\n"
        "if not os.fork(): time.sleep(30); os._exit(0)\n"  # a worker that holds its stdin open
        "print(g.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    try:
        assert eventually(lambda: not is_running(child))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)  # the worker


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.ci
def test_signals_for_the_whole_job_leave_it_to_its_rank(gateway: GatewayProcess) -> None:
    with Called() as zero:
        gateway.update({ZERO: (0, "127.0.0.1", zero.port)})
        assert gateway.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(gateway.pid, number)
        with Calling(zero, port_of(gateway), routing_id(0)) as caller:
            assert caller.echoes()
        gateway.stop()
        assert not is_running(gateway.pid)
        with pytest.raises(GatewayLost, match="ended"):
            gateway.counts()


@pytest.mark.ci
def test_a_gateway_that_is_killed_is_told_of() -> None:
    told: list[dict[str, str]] = []
    gateway = GatewayProcess("127.0.0.1", 0, told=told.append)
    gateway.start()
    assert gateway.pid is not None
    os.kill(gateway.pid, signal.SIGKILL)
    assert eventually(lambda: bool(told))
    assert told[0]["event"] == "ended" and "status -9" in told[0]["text"]
    gateway.stop()


def test_a_port_that_is_taken_says_by_whom() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}: process {os.getpid()} \("):
            GatewayProcess("127.0.0.1", port).start()


TABLES = [
    ({ZERO: (239, "127.0.0.1", 1)}, "slot=239 must be 0 to 238"),
    ({ZERO: (0, "127.0.0.1", 0)}, "port=0 must be 1 to 65535"),
    ({ZERO: (0, "localhost", 1)}, "host='localhost' must be an IP address"),
    ({"a b": (0, "127.0.0.1", 1)}, "name='a b' must be letters"),
    ({ZERO: (0, "::1", 1), THREE: (0, "::1", 2)}, "slot=0 is that of rank-0"),
]


@pytest.mark.parametrize(
    "ranks, message", by_default(TABLES, "slot=239 must be 0 to 238", of=lambda case: case[1])
)
def test_a_table_that_does_not_fit_is_refused_and_the_one_before_stays(
    gateway: GatewayProcess, ranks: dict[str, tuple[int, str, int]], message: str
) -> None:
    with Called() as zero:
        gateway.update({ZERO: (0, "127.0.0.1", zero.port)})
        with pytest.raises(ValueError, match=message):
            gateway.update(ranks)
        with Calling(zero, port_of(gateway), routing_id(0)) as caller:
            assert caller.echoes()


@pytest.mark.ci
def test_more_connections_than_files_are_refused_before_it_listens() -> None:
    with pytest.raises(OSError, match="may take .* open files"):
        GatewayProcess("127.0.0.1", 0, Limits(most_connections=10_000_000)).start()


@pytest.mark.ci
def test_what_goes_out_carries_the_mark() -> None:
    gateway = GatewayProcess("127.0.0.1", 0, Limits(dscp=8))
    port = gateway.start()
    try:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    except PermissionError:
        gateway.stop()
        pytest.skip("seeing packets takes root")
    with wire, Called() as zero:
        wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 27)  # others use the loopback, too
        wire.bind(("lo", 0))
        wire.settimeout(10)
        gateway.update({ZERO: (0, "127.0.0.1", zero.port)})
        with Calling(zero, port, routing_id(0)) as caller:
            assert caller.echoes()
        gateway.stop()
        marks: dict[int, set[int]] = {port: set(), zero.port: set()}  # by the sender's port
        while not all(marks.values()):
            packet = wire.recv(65536)
            sender = int.from_bytes(packet[20:22], "big")
            if sender in marks:
                marks[sender].add(packet[1] >> 2)
    assert marks == {port: {8}, zero.port: {0}}  # outside, and inside


@pytest.mark.ci
def test_a_rate_is_kept_within_5_percent_and_can_be_changed(gateway: GatewayProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank:
        gateway.update({ZERO: (0, "127.0.0.1", rank.getsockname()[1])})
        rank.settimeout(10)
        callers: list[socket.socket] = []
        counts = [0, 0]
        for index in range(2):
            caller = socket.create_connection(("127.0.0.1", port_of(gateway)), timeout=10)
            for piece in socks(ZERO):
                caller.sendall(piece)
            callers.append(caller)
            inside, _ = rank.accept()
            inside.settimeout(60)
            for function, arguments in ((send, (inside,)), (count, (caller, counts, index))):
                threading.Thread(target=function, args=arguments, daemon=True).start()
        wait = threading.Event()
        for rate in (4e6, 20e6):
            gateway.set_rate(rate)
            wait.wait(1)  # what was in buffers has come
            before, began = [*counts], time.monotonic()
            wait.wait(3)
            seconds = time.monotonic() - began
            passed = [now - then for now, then in zip(counts, before, strict=True)]
            assert 0.5 * rate < sum(passed) / seconds < 1.05 * rate  # less on a busy machine
            assert min(passed) > 0  # nobody is left out
        gateway.set_rate(None)
        before, began = sum(counts), time.monotonic()
        wait.wait(1)
        assert (sum(counts) - before) / (time.monotonic() - began) > 30e6
        for caller in callers:
            caller.close()


def send(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(1 << 16))


def count(connection: socket.socket, counts: list[int], index: int) -> None:
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            counts[index] += len(data)
