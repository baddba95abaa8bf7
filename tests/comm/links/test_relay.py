"""Two sites that can only call out meet at a relay, and nobody else gets in by it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsx.comm.links import greetings
from dsx.comm.links.gateway_process import Event, GatewayProcess
from dsx.comm.links.greetings import pack_message, rank_name, what_is_signed
from dsx.comm.links.key_changes import revoke_keys
from dsx.comm.links.keys import Keys
from tests.comm.links.callers import Called, Calling, ask, eventually, exactly, socks
from tests.comm.links.folders import sites

DSX = [sys.executable, "-c", "from dsx.cli import app; app()"]
THREE = rank_name("site-a", 3)


class Relay:
    """`dsx relay` as a process; `lines` is what it has said."""

    def __init__(self, keys: Path, *options: str) -> None:
        command = [*DSX, "relay", "--keys", str(keys), "--port", "0", "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        self.lines: list[str] = [first]
        self.port = int(first.partition("127.0.0.1:")[2].split()[0])
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def has_said(self, text: str) -> bool:
        return eventually(lambda: any(text in line for line in self.lines))

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(10)
        assert self.process.stdout is not None
        return status


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    made = sites(tmp_path, "site-a", "site-b", "relay-keys")
    (made["relay-keys"] / "relay-keys.secret").unlink()  # a relay needs none
    return made


@pytest.fixture
def relay(folders: dict[str, Path]) -> Generator[Relay, None, None]:
    started = Relay(folders["relay-keys"])
    yield started
    if started.process.poll() is None:
        started.end()


def gateway_of(
    stack: ExitStack, folders: dict[str, Path], member: str, told: list[Event] | None = None
) -> GatewayProcess:
    """Start a gateway that nobody outside can call."""
    keys = Keys.load(folders[member], member)
    taken = [] if told is None else told
    gateway = GatewayProcess("127.0.0.1", 0, sign=keys.sign, told=taken.append)
    gateway.start()
    stack.callback(gateway.stop)
    return gateway


def registered(gateway: GatewayProcess, relay: Relay, called: Called) -> None:
    line = f"site-a has registered from 127.0.0.1: {THREE}\n"
    before = relay.lines.count(line)
    gateway.update(
        ranks={THREE: (0, "127.0.0.1", called.port)}, relays=[("127.0.0.1", relay.port, "site-a")]
    )
    assert eventually(lambda: relay.lines.count(line) > before)


def test_a_rank_is_reached_through_the_relay_cut_off_and_reached_again(
    folders: dict[str, Path], relay: Relay
) -> None:
    assert "for relay-keys, site-a, site-b; Ctrl-C ends it" in relay.lines[0]
    told: list[Event] = []
    with ExitStack() as stack:
        called = stack.enter_context(Called())
        a = gateway_of(stack, folders, "site-a", told)
        b = gateway_of(stack, folders, "site-b")
        ways = b.update(ways={THREE: ("127.0.0.1", relay.port)})
        caller = stack.enter_context(Calling(called, ways[THREE], b""))
        assert caller.waits_for(zmq.EVENT_DISCONNECTED)  # not registered: it calls again
        registered(a, relay, called)
        assert caller.echoes() and caller.echoes(10_000_000)
        failures = b.counts()["ways"][THREE]
        assert [*failures] == [f"127.0.0.1:{relay.port}: nobody listens there under it"]
        stranger = stack.enter_context(Calling(called, ways[THREE], b"", is_known=False))
        assert stranger.waits_for(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        # another process takes the rank's place: what was joined is cut, callers go to the new
        other = stack.enter_context(Called())
        registered(a, relay, other)
        assert relay.has_said("site-a from 127.0.0.1 is gone")
        assert caller.waits_for(zmq.EVENT_DISCONNECTED)
        second = stack.enter_context(Calling(other, ways[THREE], b""))
        assert second.echoes()
        assert {"event": "registered", "text": f"127.0.0.1:{relay.port}"} in told
    assert relay.end() == 0
    assert relay.lines[-1] == "SIGINT: closed\n" or relay.has_said("SIGINT: closed")


@pytest.mark.ci
def test_a_relay_that_is_started_again_is_found_again(folders: dict[str, Path]) -> None:
    with ExitStack() as stack:
        called = stack.enter_context(Called())
        told: list[Event] = []
        relay = Relay(folders["relay-keys"])
        a = gateway_of(stack, folders, "site-a", told)
        b = gateway_of(stack, folders, "site-b")
        registered(a, relay, called)
        ways = b.update(ways={THREE: ("127.0.0.1", relay.port)})
        caller = stack.enter_context(Calling(called, ways[THREE], b""))
        assert caller.echoes()
        relay.process.kill()
        relay.process.wait(10)
        assert caller.waits_for(zmq.EVENT_DISCONNECTED)
        assert eventually(lambda: any(event["event"] == "unregistered" for event in told))
        again = Relay(folders["relay-keys"], "--port", str(relay.port))
        stack.callback(again.end)
        assert caller.echoes()


@pytest.mark.ci
def test_a_revoked_member_is_cut_off_and_not_let_in_again(
    folders: dict[str, Path], relay: Relay
) -> None:
    with ExitStack() as stack:
        called = stack.enter_context(Called())
        told: list[Event] = []
        a = gateway_of(stack, folders, "site-a", told)
        b = gateway_of(stack, folders, "site-b")
        registered(a, relay, called)
        ways = b.update(ways={THREE: ("127.0.0.1", relay.port)})
        caller = stack.enter_context(Calling(called, ways[THREE], b""))
        assert caller.echoes()
        revoke_keys(folders["relay-keys"], "site-a")
        assert relay.has_said("site-a from 127.0.0.1 is gone: its key is revoked")
        assert caller.waits_for(zmq.EVENT_DISCONNECTED)
        text = "the relay refuses: not a member with a key that stands"
        assert eventually(lambda: any(text in event.get("text", "") for event in told))
        failures = b.counts()["ways"][THREE]
        assert failures[f"127.0.0.1:{relay.port}: nobody listens there under it"] > 0


class Applicant:
    """Speaks to a relay by hand."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=10)

    def __enter__(self) -> Applicant:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def say(self, kind: bytes, **body: object) -> bytes:
        message = pack_message(kind, **body)
        self.connection.sendall(message)
        return message[greetings.MESSAGE_HEAD.size :]

    def hear(self) -> tuple[bytes, dict[str, Any]]:
        _, kind, length = greetings.MESSAGE_HEAD.unpack(exactly(self.connection, 7))
        return kind, json.loads(exactly(self.connection, length))


def test_only_a_fresh_signature_of_the_member_registers_its_own_ranks(
    folders: dict[str, Path], relay: Relay
) -> None:
    a, b = (Keys.load(folders[name], name) for name in ("site-a", "site-b"))
    request: dict[str, Any] = {"member": "site-a", "names": [THREE]}
    with Applicant(relay.port) as applicant:
        raw = applicant.say(b"R", **request)
        kind, body = applicant.hear()
        nonce = bytes.fromhex(body["nonce"])
        assert kind == b"C" and len(nonce) == 32
        good = a.sign(what_is_signed(nonce, raw))
        applicant.say(b"S", signature=good.hex())
        assert applicant.hear() == (b"K", {})
    refusals = {
        "replayed": good,
        "another member's": b.sign(what_is_signed(nonce, raw)),
        "garbage": os.urandom(64),
        "nothing": b"",
    }
    for case, signature in refusals.items():
        with Applicant(relay.port) as applicant:
            assert applicant.say(b"R", **request) == raw
            kind, body = applicant.hear()
            assert body["nonce"] != nonce.hex()
            if case == "another member's":
                signature = b.sign(what_is_signed(bytes.fromhex(body["nonce"]), raw))
            applicant.say(b"S", signature=signature.hex())
            kind, body = applicant.hear()
            assert (kind, body["why"]) == (b"N", "the signature is not that of the member's key")
    for changed, why in (
        ({"names": [rank_name("site-b", 3)]}, "not the member's own"),
        ({"names": ["localhost"]}, "not the member's own"),
        ({"names": []}, "registration of 0 ranks"),
        ({"member": "stranger", "names": [rank_name("stranger", 0)]}, "not a member"),
    ):
        with Applicant(relay.port) as applicant:
            applicant.say(b"R", **{**request, **changed})
            kind, body = applicant.hear()
            assert kind == b"N" and why in body["why"]
    # what was signed for one list of ranks is worth nothing for another
    with Applicant(relay.port) as applicant:
        applicant.say(b"R", member="site-a", names=[THREE, rank_name("site-a", 4)])
        nonce = bytes.fromhex(applicant.hear()[1]["nonce"])
        applicant.say(b"S", signature=a.sign(what_is_signed(nonce, raw)).hex())
        assert applicant.hear()[0] == b"N"


def test_a_relay_connects_to_nobody_and_tokens_are_not_guessed(relay: Relay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.5)
        number = other.getsockname()[1].to_bytes(2, "big")
        assert ask(relay.port, b"\5\1\0", b"\5\1\0\1\x7f\0\0\1" + number)[:4] == b"\5\0\5\10"
        name = b"\5\1\0\3\x09localhost" + number
        assert ask(relay.port, b"\5\1\0", name)[:4] == b"\5\0\5\5"
        assert ask(relay.port, *socks(THREE))[:4] == b"\5\0\5\5"
        assert ask(relay.port, pack_message(b"T", token="0" * 32)) == b""
        assert ask(relay.port, pack_message(b"T", token=7)) == b""
        assert ask(relay.port, pack_message(b"O", name=THREE, token="0" * 32)) == b""
        assert ask(relay.port, b"\xff" + bytes(8) + b"\x7f") == b""
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.ci
def test_silent_connections_do_not_disturb_a_relay(folders: dict[str, Path], relay: Relay) -> None:
    with ExitStack() as stack:
        called = stack.enter_context(Called())
        a, b = (gateway_of(stack, folders, name) for name in ("site-a", "site-b"))
        registered(a, relay, called)
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", relay.port)))
        ways = b.update(ways={THREE: ("127.0.0.1", relay.port)})
        caller = stack.enter_context(Calling(called, ways[THREE], b""))
        assert caller.echoes(milliseconds=2000)


@pytest.mark.ci
def test_bytes_of_any_kind_neither_end_a_relay_nor_what_it_joins(
    folders: dict[str, Path], relay: Relay
) -> None:
    with ExitStack() as stack:
        called = stack.enter_context(Called())
        a, b = (gateway_of(stack, folders, name) for name in ("site-a", "site-b"))
        registered(a, relay, called)
        ways = b.update(ways={THREE: ("127.0.0.1", relay.port)})
        caller = stack.enter_context(Calling(called, ways[THREE], b""))
        assert caller.echoes()
        kinds = st.sampled_from([b"", b"\5", b"\5\1\0", b"DSXR", *messages("RCSKNOTXA")])

        @settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(kinds, st.binary(min_size=1, max_size=500))
        def say(first: bytes, rest: bytes) -> None:
            ask(relay.port, first + rest, b"")

        say()
        assert caller.echoes() and relay.process.poll() is None


def messages(kinds: str) -> list[bytes]:
    body = {"member": "site-a", "names": [THREE], "token": "0" * 32, "signature": "00"}
    return [pack_message(kind.encode(), **body) for kind in kinds]


def test_what_cannot_be_served_is_said_in_one_line(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*DSX, "relay", *arguments], capture_output=True, text=True)

    done = run("--keys", str(tmp_path / "none"), "--port", "0")
    assert done.returncode == 2 and "none/members: No such file" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("--keys", str(folders["relay-keys"]), "--port", port, "--host", "127.0.0.1")
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: process {os.getpid()}" in done.stderr


def test_relays_take_the_key_that_signs() -> None:
    with pytest.raises(ValueError, match="give GatewayProcess its `sign`"):
        GatewayProcess("127.0.0.1", 0).update(relays=[("relay.example", 29500, "site-a")])
