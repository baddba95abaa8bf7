"""Ten thousand connections that say rubbish, at the ports that a site opens to the others.

A rank's own port: test_adversaries.py; a relay's: test_relay.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsx.comm.links.check import check_sites
from dsx.comm.links.gateway_process import GatewayProcess
from dsx.comm.links.greetings import rank_name, routing_id
from dsx.comm.links.settings import LinkSettings
from tests.comm.links.callers import Called, Calling
from tests.comm.links.folders import sites
from tests.comm.links.test_adversaries import raw
from tests.distributed import free_port

pytestmark = pytest.mark.ci
COUNT = 10_000


def say_rubbish(port: int, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(COUNT):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            one.sendall(raw(source))


def test_a_gateway_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = GatewayProcess("127.0.0.1", 0)
    port = gateway.start()
    try:
        with Called() as rank:
            gateway.update({rank_name("site-a", 0): (0, "127.0.0.1", rank.port)})
            with Calling(rank, port, routing_id(0)) as caller, ThreadPoolExecutor(1) as other:
                assert caller.echoes()
                fuzzing = other.submit(say_rubbish, port, 3)
                while not fuzzing.done():
                    assert caller.echoes(100_000)
                fuzzing.result()
                assert caller.echoes(1_000_000)
                with Calling(rank, port, routing_id(0)) as later:
                    assert later.echoes()
            counts = gateway.counts()
    finally:
        gateway.stop()
    assert sum(counts["refused"].values()) > COUNT / 2
    with capsys.disabled():
        print(f"\nrefused: {counts['refused']}")


def test_a_check_of_keys_says_what_it_would_have_said(tmp_path: Path) -> None:
    folders = sites(tmp_path, "a", "b")
    port = free_port()
    members = (f"a=127.0.0.1:{port}", "b")
    settings = [LinkSettings("curve", members, str(folders[name]), port=port) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(check_sites, settings[0], 0, 60.0)
        time.sleep(0.5)
        say_rubbish(port, 4)
        second = threads.submit(check_sites, settings[1], 1, 20.0)
        for found in (first.result(90), second.result(90)):
            assert [site.problem for site in found] == [None]
