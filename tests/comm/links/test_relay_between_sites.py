"""Two sites in namespaces that nobody can call, with no route to each other, meet at a relay.

Each has one line, to the relay's host, which passes on no packets. Where there is no root or no
support for namespaces, it is skipped with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from dsx.bench.namespaces import TestbedUnavailable, remove_namespaces, require_tools, run_ip
from dsx.comm.links.greetings import rank_name
from tests.comm.links.callers import eventually
from tests.comm.links.folders import sites

ROOT = Path(__file__).parents[3]
A, B, RELAY = (f"dsx-{os.getpid()}-{digit}" for digit in (6, 7, 8))
NAME = rank_name("site-b", 0)
PORT = 29500

CALLED = f"""
import sys
from dsx.comm.links.gateway_process import GatewayProcess
from dsx.comm.links.keys import Keys
from tests.comm.links.callers import Called

class Everybody(set):
    __contains__ = lambda self, key: True

with Called() as called:
    called.allowed = Everybody()
    keys = Keys.load(sys.argv[1], "site-b")
    gateway = GatewayProcess("127.0.0.1", 0, sign=keys.sign)
    gateway.start()
    ranks = {{"{NAME}": (0, "127.0.0.1", called.port)}}
    gateway.update(ranks, relays=[("10.78.1.1", {PORT}, "site-b")])
    print(called.public.decode(), flush=True)
    sys.stdin.read()
    gateway.stop()
"""

CALLING = f"""
import json, sys, time
from types import SimpleNamespace
from dsx.comm.links.gateway_process import GatewayProcess
from tests.comm.links.callers import Calling

gateway = GatewayProcess("127.0.0.1", 0)
gateway.start()
ways = gateway.update(ways={{"{NAME}": ("10.78.0.1", {PORT})}})
whom = SimpleNamespace(public=sys.argv[1].encode(), allowed=set())
with Calling(whom, ways["{NAME}"], b"") as caller:
    for line in sys.stdin:
        began = time.monotonic()
        echoes = caller.echoes(int(line), milliseconds=40_000)
        print(json.dumps([echoes, time.monotonic() - began]), flush=True)
gateway.stop()
"""

CONNECT = (
    "import socket, sys\n"
    "try:\n"
    "    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)\n"
    "except OSError as error:\n"
    "    print(error)\n"
    "else:\n"
    "    print('connected')\n"
)


@pytest.fixture
def lines() -> Generator[None, None, None]:
    """A line of 100 Mbit/s from each site to the relay."""
    try:
        require_tools()
        for name in (A, B, RELAY):
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        for number, site in enumerate((A, B)):
            near, far = f"dsxs{number}", f"dsxr{number}"
            run_ip("link", "add", near, "netns", site, "type", "veth",
                   "peer", "name", far, "netns", RELAY)  # fmt: skip
            for name, device, digit in ((site, near, 2), (RELAY, far, 1)):
                run_ip("-n", name, "address", "add", f"10.78.{number}.{digit}/24", "dev", device)
                run_ip("-n", name, "link", "set", device, "up")
                subprocess.run(
                    ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root",
                     "tbf", "rate", "100mbit", "burst", "64kb", "latency", "100ms"],
                    check=True,
                )  # fmt: skip
            run_ip("-n", site, "route", "add", "default", "via", f"10.78.{number}.1")
        within(RELAY, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward").wait(10)
        yield
    except TestbedUnavailable as error:
        pytest.skip(f"no namespaces here: {error}")
    finally:
        remove_namespaces([A, B, RELAY])


def within(namespace: str, *command: str) -> subprocess.Popen[str]:
    """Start a command in a namespace."""
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_two_sites_that_can_only_call_out_meet_at_a_relay(lines: None, tmp_path: Path) -> None:
    folders = sites(tmp_path, "site-a", "site-b", "at-relay")
    python = sys.executable
    command = "from dsx.cli import app; app()"
    keys = str(folders["at-relay"])
    relay = within(RELAY, python, "-c", command, "relay", "--keys", keys, "--host", "0.0.0.0")
    started = [relay]
    try:
        assert "listening on 0.0.0.0:29500" in said(relay)
        called = within(B, python, "-c", CALLED, str(folders["site-b"]))
        started.append(called)
        public = said(called)
        assert said(relay) == f"site-b has registered from 10.78.1.2: {NAME}"
        # nobody reaches site b: not site a, which has no route, and not the relay's host
        for where in (A, RELAY):
            for port in (PORT, 22):
                tried = within(where, python, "-c", CONNECT, "10.78.1.2", str(port))
                assert said(tried) != "connected"
                tried.wait(10)
        calling = within(A, python, "-c", CALLING, public)
        started.append(calling)
        assert echo(calling, 1000)[0]
        is_whole, seconds = echo(calling, 10_000_000)
        assert is_whole and seconds > 0.8  # both ways over a line of 100 Mbit/s
        # a line that is cut for 2 s
        run_ip("-n", RELAY, "link", "set", "dsxr0", "down")
        cut_at = time.monotonic()
        assert calling.stdin is not None
        print(1_000_000, file=calling.stdin, flush=True)
        assert eventually(lambda: time.monotonic() > cut_at + 2)
        run_ip("-n", RELAY, "link", "set", "dsxr0", "up")
        assert json.loads(said(calling))[0]
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait(10)


def echo(calling: subprocess.Popen[str], num_bytes: int) -> tuple[bool, float]:
    assert calling.stdin is not None
    print(num_bytes, file=calling.stdin, flush=True)
    is_whole, seconds = json.loads(said(calling))
    return is_whole, seconds
